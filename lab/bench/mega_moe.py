"""The call of `fp8_mega_moe` or `fp8_fp4_mega_moe` for `bench distributed`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deep_gemm.across.mega_check import HIDDEN_MULTIPLE, INTERMEDIATE_MULTIPLE
from deep_gemm.core.check.checks import Operand
from deep_gemm.distributed import (
    fp8_fp4_mega_moe,
    fp8_mega_moe,
    get_symm_buffer_for_mega_moe,
    get_symm_buffer_for_sm90_mega_moe,
    mega_moe_pre_dispatch_sm90,
    transform_weights_for_mega_moe,
    transform_weights_for_mega_moe_sm90,
)
from deep_gemm.gemm.packed import is_packed
from deep_gemm.testing import calc_diff

TOLERANCE = 0.01
"""The tolerance in DeepGEMM's own tests."""


class MegaCall:
    """FP8 tokens in a buffer, and the call that computes their mixture."""

    def __init__(self, x: Tensor, ids: Tensor, p: Tensor, weights: tuple[Operand, Operand], experts: int) -> None:
        (tokens, topk), hidden, intermediate = ids.shape, x.shape[1], weights[0][0].shape[1] // 2
        sizes = None, experts, tokens, topk, hidden, intermediate
        self.function: Callable[..., None]
        if is_packed(weights[0]):
            self.function, self.buffer = fp8_fp4_mega_moe, get_symm_buffer_for_mega_moe(*sizes)
            self.weights = transform_weights_for_mega_moe(*weights)
        else:
            self.function, self.buffer = fp8_mega_moe, get_symm_buffer_for_sm90_mega_moe(*sizes)
            self.weights = transform_weights_for_mega_moe_sm90(*weights)
        self.y = torch.empty_like(x)
        filled = self.buffer.x, self.buffer.x_sf, self.buffer.topk_idx, self.buffer.topk_weights
        mega_moe_pre_dispatch_sm90(x, ids, p, *filled)

    @property
    def waits(self) -> bool:
        """Tell whether the host waits in a call, so that no graph can capture it."""
        return self.buffer.calls is None

    def __call__(self) -> Tensor:
        """Compute the mixture."""
        self.function(self.y, *self.weights, self.buffer)
        return self.y

    def is_near(self, right: Tensor) -> bool:
        """Tell whether the result is near the layer's; the layer casts, and applies routes' weights, at other steps."""
        return bool(calc_diff(self(), right) < TOLERANCE)


def fits(hidden: int, intermediate: int) -> bool:
    """Tell whether the call supports these sizes."""
    return hidden % HIDDEN_MULTIPLE == 0 and intermediate % INTERMEDIATE_MULTIPLE == 0
