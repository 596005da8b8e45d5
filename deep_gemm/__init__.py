"""FP8 matrix products with fine-grained scaling for NVIDIA Hopper."""

__version__ = "0.1.0"
