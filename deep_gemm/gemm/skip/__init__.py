"""Products into the parts of heads."""
