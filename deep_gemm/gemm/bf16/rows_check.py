"""Products of grouped rows of BF16: what is asked, checked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Sizes
from ...core.check.integers import INT32_MAX, integer_in_range
from ..rows.check import ZERO_PADDING_BLOCK
from .check import depth, laid_out, operand


class Bf16RowsProblem(NamedTuple):
    """Rows of A, each multiplied by its group's B `[groups, n, k]`, with n or k contiguous."""

    a: Tensor
    """`[m, k]`, the groups' rows stacked; or `[groups, max_m, k]`, of which `layout` counts the first ones."""
    b: Tensor
    d: Tensor
    """`[m, n]`, or `[groups, max_m, n]`"""
    layout: Tensor
    """A group id for each row (-1: none), or with `layout_is_ends` the end of each group's rows; or counts."""
    expected_m: float
    """Rows of a group, about."""
    layout_is_ends: bool = False
    alignment: int = ZERO_PADDING_BLOCK
    """Alignment, in rows, of group starts and of zero padding."""
    zero_padding: bool = False

    @property
    def is_masked(self) -> bool:
        """Tell whether each group has a matrix of rows of its own."""
        return self.a.dim() == 3


def bf16_contiguous_problem(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    layout: Tensor | None,
    *,
    major: str,
    use_psum_layout: bool,
    ensure_zero_padding: bool,
    alignment: int,
) -> Bf16RowsProblem:
    """Check a product of stacked rows. `alignment` applies to group starts in the form of ends."""
    sizes: Sizes = {}
    a = operand("a", a, ("m", "k"), sizes)
    b = operand("b", b, ("groups", "k", "n") if major[1] == "n" else ("groups", "n", "k"), sizes)
    axis = "groups" if use_psum_layout else "m"
    layout = checks.int32("grouped_layout", layout, axis, sizes[axis])
    inputs = {"a": a, "b": b, "grouped_layout": layout}
    d, _ = checks.outputs(inputs, d, None, ("m", "n"), sizes, torch.bfloat16)
    a, b = _operands(a, b.mT if major[1] == "n" else b)
    alignment = alignment if use_psum_layout else ZERO_PADDING_BLOCK
    if checks.on_host(layout):
        if use_psum_layout:
            checks.ends(layout, sizes["m"], alignment)
        else:
            checks.in_range("grouped_layout", layout, -1, sizes["groups"] - 1)
    zero_padding = ensure_zero_padding or not use_psum_layout
    expected_m = sizes["m"] / max(sizes["groups"], 1)
    return Bf16RowsProblem(a, b, d, layout, expected_m, use_psum_layout, alignment, zero_padding)


def bf16_masked_problem(
    a: Tensor, b: Tensor, d: Tensor | None, masked_m: Tensor | None, expected_m: int | None
) -> Bf16RowsProblem:
    """Check a product of rows that are counted for each group."""
    sizes: Sizes = {}
    a, b = operand("a", a, ("groups", "max_m", "k"), sizes), operand("b", b, ("groups", "n", "k"), sizes)
    masked_m = checks.int32("masked_m", masked_m, "groups", sizes["groups"])
    max_m = sizes["max_m"]
    expected_m = max_m if expected_m is None else integer_in_range("expected_m", expected_m, 0, INT32_MAX)
    inputs = {"a": a, "b": b, "masked_m": masked_m}
    d, _ = checks.outputs(inputs, d, None, ("groups", "max_m", "n"), sizes, torch.bfloat16)
    if checks.on_host(masked_m):
        checks.in_range("masked_m", masked_m, 0, max_m)
    a, b = _operands(a, b)
    return Bf16RowsProblem(a, b, d, masked_m, expected_m)


def _operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = laid_out("a", a, "m"), laid_out("b", b, "n")
    if a.numel() and a.stride(-1) != 1:
        raise ValueError(f"a: expected values contiguous along k, got strides {a.stride()}")
    depth(a, b)
    return a, b
