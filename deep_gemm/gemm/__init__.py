"""Products of FP8 and of BF16: dense, of grouped rows, of groups along k, and of heads."""
