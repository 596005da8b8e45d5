"""The operator of the gated activation."""

from __future__ import annotations

import torch
from torch import Tensor

from ..casts.check import activation_problem
from ..casts.ops import fake_rows
from ..casts.rules import Quantized
from ..core.operators import operator
from . import activation


def silu_mul(
    x: Tensor,
    row_weights: Tensor | None = None,
    masked_m: Tensor | None = None,
    ends: Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = False,
    min_amax: float = 0.0,
    mn_major: bool = False,
) -> Quantized:
    """Activate and cast."""
    return activation.silu_mul_cast_to_fp8(
        x,
        row_weights,
        masked_m=masked_m,
        ends=ends,
        limit=limit,
        use_ue8m0=use_ue8m0,
        min_amax=min_amax,
        mn_major=mn_major,
    )


def fake_silu_mul(
    x: Tensor,
    row_weights: Tensor | None = None,
    masked_m: Tensor | None = None,
    ends: Tensor | None = None,
    limit: float | None = None,
    use_ue8m0: bool = False,
    min_amax: float = 0.0,
    mn_major: bool = False,
) -> Quantized:
    """Stand for both."""
    activation_problem(x, row_weights, masked_m, ends, limit, alignment=1)  # fake ends are aligned to nothing
    activated = torch.empty((*x.shape[:-1], x.shape[-1] // 2), device=x.device)
    return fake_rows(activated, min_amax=min_amax, mn_major=mn_major)


operator(
    "silu_mul_cast_to_fp8(Tensor x, Tensor? row_weights=None, Tensor? masked_m=None, Tensor? ends=None, "
    "float? limit=None, bool use_ue8m0=False, float min_amax=0.0, bool mn_major=False) -> (Tensor, Tensor)",
    silu_mul,
    fake_silu_mul,
)
