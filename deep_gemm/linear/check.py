"""Linear layers: what is asked, checked."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..casts.rules import LAYER_TYPES
from ..core.check import checks
from ..core.check.checks import Operand, Sizes
from ..core.check.layout import SCALE_BLOCK
from ..gemm import packed


class LinearProblem(NamedTuple):
    """Rows of any tensor times an FP8 or FP4 weight, plus a bias."""

    x: Tensor
    """`[m, k]`"""
    w: Operand
    """`[n, k]`, as `weight` gives it."""
    bias: Tensor | None
    """`[n]`"""
    out: Tensor
    """`[m, n]` BF16."""
    whole_out: Tensor
    """`out` with the leading dimensions of the caller's x."""


def linear_problem(x: Tensor, w: Operand, out: Tensor | None, bias: Tensor | None) -> LinearProblem:
    """Check a linear layer, and make its output if it was left out."""
    checks.has_type("x", checks.tensor("x", x), LAYER_TYPES)
    checks.supported_device("x", x)
    if x.dim() < 1:
        raise ValueError(f"x: expected shape (..., k), got {tuple(x.shape)}")
    *leading, k = x.shape
    m, sizes = prod(leading), Sizes(k=k)
    values, scales = weight("w", w, ("n", "k"), sizes)
    n = sizes["n"]
    inputs = {"x": x, "w": values, "sfw": scales}
    if bias is not None:
        checks.has_type("bias", checks.tensor("bias", bias), LAYER_TYPES)
        checks.bind("bias", bias, ("n",), sizes)
        inputs["bias"] = bias
    checks.same_device(inputs, x.device, "x")
    checks.depth(k)
    checks.columns(n, torch.bfloat16)
    checks.k_major("w", values)
    if out is None:
        out = torch.empty((*leading, n), dtype=torch.bfloat16, device=x.device)
    else:
        checks.written("out", out)
        if checks.wants_gradient(x, bias):
            raise ValueError(
                "out: expected None, because x or bias requires a gradient: leave it out, or call under torch.no_grad()"
            )
        checks.has_type("out", checks.tensor("out", out), (torch.bfloat16,))
        if out.shape != (*leading, n):
            raise ValueError(f"out: expected shape (..., n) = {(*leading, n)}, got {tuple(out.shape)}")
        checks.same_device({"out": out}, x.device, "x")
        checks.rows("out", out, "n")
        checks.no_overlap(inputs, out, None, "out")
    return LinearProblem(x.reshape(m, k), (values, scales), bias, _rows_of(out, m, n), out)


def weight(name: str, given: Operand, axes: tuple[str, ...], sizes: Sizes) -> Operand:
    """Check a weight `[n, k]`, or one for each group: FP8 with a scale for each 128x128 block, or FP4 (gemm/packed.py).

    FP4's values are given back as bytes, and its scales as words where they are not FP32.
    """
    if packed.is_packed(given):
        return packed.weight(name, given, axes, sizes, depth=axes[-1])
    values, scales = checks.operand(name, given, axes, sizes)
    *outer, k = values.shape
    checks.scales(f"sf{name}", scales, axes[-2], tuple(outer), k, SCALE_BLOCK)
    return values, scales


def _rows_of(out: Tensor, m: int, n: int) -> Tensor:
    """See an output of any leading dimensions as `[m, n]`."""
    try:
        return out.view(m, n)
    except RuntimeError:
        raise ValueError(f"out: expected rows at equal distances, got strides {out.stride()}") from None
