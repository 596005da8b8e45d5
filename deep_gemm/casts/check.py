"""Activations with gates: what is asked, checked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.check import checks
from ..core.check.checks import Sizes
from ..core.check.numbers import positive

LAYER_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of activations that layers take."""


def check_counts(x: Tensor, masked_m: Tensor) -> None:
    """Check how many of its rows each group of x uses. The host reads no count of a GPU."""
    sizes: Sizes = {}
    checks.bind("x", checks.tensor("x", x), ("groups", "max_m", "k"), sizes)
    checks.int32("masked_m", masked_m, "groups", sizes["groups"])
    checks.same_device({"masked_m": masked_m}, x.device, "x")
    if checks.on_host(masked_m):
        checks.in_range("masked_m", masked_m, 0, sizes["max_m"])


class ActivationProblem(NamedTuple):
    """FP8 values of silu(gate) * up, from rows that hold the gate first and then up."""

    x: Tensor
    """`[..., m, 2 i]`"""
    row_weights: Tensor | None
    """FP32 `[..., m]`: factors of whole rows."""
    masked_m: Tensor | None
    """`[groups]`: how many of its rows each group uses, x being `[groups, max_m, 2 i]`."""
    ends: Tensor | None
    """`[groups]`: where the rows of each group end, x being `[m, 2 i]`."""
    alignment: int
    """Alignment, in rows, of group starts where `ends` is given."""
    limit: float | None


def activation_problem(
    x: Tensor,
    row_weights: Tensor | None,
    masked_m: Tensor | None,
    ends: Tensor | None,
    limit: float | None,
    alignment: int,
) -> ActivationProblem:
    """Check an activation with gates."""
    checks.no_gradient("x", x)
    checks.no_gradient("row_weights", row_weights)
    checks.has_type("x", checks.tensor("x", x), LAYER_TYPES)
    checks.supported_device("x", x)
    if masked_m is not None and ends is not None:
        raise ValueError("ends: expected None where masked_m is given, got both")
    axes = ("groups", "max_m", "2 i") if masked_m is not None else ("m", "2 i")
    sizes: Sizes = {}
    if masked_m is not None or ends is not None:
        checks.bind("x", x, axes, sizes)
    elif x.dim() < 2:
        raise ValueError(f"x: expected shape (..., m, 2 i), got {tuple(x.shape)}")
    if x.shape[-1] % 2:
        raise ValueError(f"x: expected an even number of columns, gate and up, got {x.shape[-1]}")
    given: dict[str, Tensor] = {}
    if row_weights is not None:
        checks.has_type("row_weights", checks.tensor("row_weights", row_weights), (torch.float32,))
        if row_weights.shape != x.shape[:-1]:
            expected, got = tuple(x.shape[:-1]), tuple(row_weights.shape)
            raise ValueError(f"row_weights: expected shape (..., m) = {expected}, got {got}")
        given["row_weights"] = row_weights
    if masked_m is not None:
        check_counts(x, masked_m)
    if ends is not None:
        groups = checks.tensor("ends", ends).numel()
        given["ends"] = checks.int32("ends", ends, "groups", groups)
    checks.same_device(given, x.device, "x")
    if ends is not None and checks.on_host(ends):
        checks.ends(ends, sizes["m"], alignment, "ends")
    limit = None if limit is None else positive("limit", limit)
    return ActivationProblem(x, row_weights, masked_m, ends, alignment, limit)
