"""Products of groups of BF16 along k: what is asked, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Sizes
from ...core.check.depths import depths_of_ends
from .check import operand


class Bf16DepthsProblem(NamedTuple):
    """D[g] = C[g] + A_g.T @ B_g. Each group's rows of A and B lie behind those of the group before."""

    a: Tensor
    """`[sum of ks, m]`, contiguous."""
    b: Tensor
    """`[sum of ks, n]`, contiguous."""
    d: Tensor
    """`[groups, m, n]`, BF16 or FP32."""
    c: Tensor | None
    """`[groups, m, n]`, of the type of D: D itself, or apart from it."""
    ks: tuple[int, ...] | None
    """The groups' rows, of any number, if the host knows them. Rows behind the last group's are not read."""
    ks_tensor: Tensor | None
    """The same on the operands' device, if the caller gave it."""
    layout: Tensor | None
    """The tensor that the caller gave: `ks_tensor`, or the ends that it was made of."""


def bf16_depths_problem(
    a: Tensor,
    b: Tensor,
    d: Tensor | None,
    ks: Sequence[int] | None,
    layout: Tensor | None,
    c: Tensor | None,
    layout_is_ends: bool,
    alignment: int,
) -> Bf16DepthsProblem:
    """Check a product of groups along k."""
    if ks is None and layout is None:
        raise ValueError("ks_cpu: expected a list, or grouped_layout with the same numbers, got neither")
    sizes: Sizes = {}
    a, b = operand("a", a, ("sum_k", "m"), sizes), operand("b", b, ("sum_k", "n"), sizes)
    inputs = {"a": a, "b": b}
    counts = None
    host_ks = None if ks is None else checks.integers("ks_cpu", ks)
    if layout is not None:
        groups = checks.tensor("grouped_layout", layout).numel() if host_ks is None else len(host_ks)
        layout = checks.int32("grouped_layout", layout, "groups", groups)
        inputs["grouped_layout"] = layout
        counts = depths_of_ends(layout, alignment, "grouped_layout") if layout_is_ends else layout
        if checks.on_host(counts):
            of_layout = tuple(counts.tolist())
            if host_ks is not None and of_layout != host_ks:
                raise ValueError(f"grouped_layout: expected the numbers of ks_cpu, {host_ks}, got {of_layout}")
            host_ks = of_layout
    if host_ks is not None:
        check_depths(host_ks, sizes["sum_k"])
    sizes["groups"] = len(host_ks) if host_ks is not None else counts.numel()  # type: ignore[union-attr]
    d, c = checks.outputs(inputs, d, c, ("groups", "m", "n"), sizes, torch.float32)
    for name, x, axis in (("a", a, "m"), ("b", b, "n")):
        checks.rows(name, x, axis)
    return Bf16DepthsProblem(a, b, d, c, host_ks, counts, layout)


def check_depths(ks: tuple[int, ...], sum_k: int) -> None:
    """Check the groups' rows."""
    for index, k in enumerate(ks):
        if k < 0:
            raise ValueError(f"ks_cpu: expected numbers of rows, got {k} at index {index}")
    if sum(ks) > sum_k:
        raise ValueError(f"ks_cpu: expected numbers that add up to {sum_k}, the rows of a, or less, got {sum(ks)}")
