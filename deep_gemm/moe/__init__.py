"""A mixture of experts on one GPU."""
