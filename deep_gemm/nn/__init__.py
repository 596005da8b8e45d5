"""Modules that are trained in FP8: a linear layer and a gated mixture of experts, with gradients for autograd.

Weights are BF16 or FP32, as an optimizer needs them, and are cast in each call, or once in a block of `keep_casts`. The
frozen modules are for inference: their weights are FP8 or FP4 already.
"""

from .experts import Experts
from .frozen import FrozenExperts, FrozenLinear
from .kept import keep_casts
from .linear import Linear

__all__ = ["Experts", "FrozenExperts", "FrozenLinear", "Linear", "keep_casts"]
