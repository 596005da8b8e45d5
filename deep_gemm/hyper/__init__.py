"""Hyper-connections: the product ahead of their norm."""
