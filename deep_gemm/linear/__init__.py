"""A linear layer."""
