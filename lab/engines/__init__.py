"""Engines that serve models with this package: their calls, and records of their runs."""
