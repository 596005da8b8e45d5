"""Experts of several processes."""
