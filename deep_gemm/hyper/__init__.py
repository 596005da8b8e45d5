"""Hyper-connections: the product before their norm."""
