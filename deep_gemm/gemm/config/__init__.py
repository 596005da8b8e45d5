"""Configurations of the kernels of products, and the configuration of a tile."""
