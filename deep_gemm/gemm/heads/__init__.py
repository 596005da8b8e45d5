"""Products of heads, a matrix for each."""
