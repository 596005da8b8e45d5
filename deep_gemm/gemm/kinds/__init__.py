"""The values that decide a kernel's code besides its tile: work, operands and their scales, D, and epilogue."""
