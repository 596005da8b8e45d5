"""Engines that serve models with this package: what they call, and what runs inside them."""
