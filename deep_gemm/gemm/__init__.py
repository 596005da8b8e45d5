"""Products of FP8 and BF16: dense, grouped, of heads."""
