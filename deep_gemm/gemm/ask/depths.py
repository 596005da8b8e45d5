"""Checks of calls of products of groups along k."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Operand
from ...core.check.layout import RECIPE_1D1D, SCALE_BLOCK, Recipe, ceil_div, recipe_numbers
from ...core.check.recipes import PER_ROW
from ..kinds.works import DEPTHS
from ..problem import Problem


def k_grouped_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    ks: Sequence[int] | None,
    ks_tensor: Tensor | None,
    c: Tensor | None,
    *,
    recipe: Recipe | None = None,
    k_major_scales: bool = True,
) -> Problem:
    """Check a product grouped along k. Scales are `[m, blocks of k]`, or `[blocks of k, m]` if not `k_major_scales`."""
    check_depths_recipe(recipe)
    host_ks, num_groups = _group_sizes(ks, ks_tensor)
    av, sfa = checks.pair("a", a)
    bv, sfb = checks.pair("b", b)
    for name, sf in (("sfa", sfa), ("sfb", sfb)):
        checks.fp32_scales(name, sf)
        if sf.dim() != 2:
            raise ValueError(f"{name}: expected 2 dimensions, got shape {tuple(sf.shape)}")
    if not k_major_scales:
        sfa, sfb = sfa.t(), sfb.t()
    m, n = sfa.shape[0], sfb.shape[0]
    if host_ks is not None:
        sum_k, num_blocks = sum(host_ks), sum(ceil_div(k, SCALE_BLOCK) for k in host_ks)
    else:  # the host doesn't know the groups' sizes, but their sum follows from the number of values
        sum_k, num_blocks = (av.numel() // m if m else bv.numel() // n if n else 0), sfa.shape[1]
    for name, values, sf, axis, rows in (("a", av, sfa, "m", m), ("b", bv, sfb, "n", n)):
        checks.fp8(name, values)
        if values.shape != (rows * sum_k,):
            raise ValueError(
                f"{name}: expected shape ({axis} * sum(ks),) = ({rows * sum_k},), got {tuple(values.shape)}"
            )
        if sf.shape[1] != num_blocks:
            raise ValueError(
                f"sf{name}: expected {num_blocks} blocks of k, sum(ceil(k / 128)) over the groups, got {sf.shape[1]}"
            )
        checks.rows(name, values, "k")
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    if ks_tensor is not None:
        inputs["ks_tensor"] = ks_tensor
    sizes = {"groups": num_groups, "m": m, "n": n}
    dtypes = checks.OUTPUT_TYPES if c is None else (torch.float32,)  # sums over several calls need FP32
    d, c = checks.outputs(inputs, d, c, ("groups", "m", "n"), sizes, torch.float32, dtypes)
    return Problem(av, sfa, bv, sfb, d, c, DEPTHS, PER_ROW, ks=host_ks, ks_tensor=ks_tensor)


def check_depths_recipe(recipe: Recipe | None) -> None:
    """Check the recipe of a product grouped along k: there is only one."""
    numbers = RECIPE_1D1D if recipe is None else recipe_numbers("recipe", recipe)
    if numbers != RECIPE_1D1D:
        raise NotImplementedError(f"recipe: expected {RECIPE_1D1D} for a k-grouped product, got {numbers}")


def _group_sizes(ks: Sequence[int] | None, ks_tensor: Tensor | None) -> tuple[tuple[int, ...] | None, int]:
    """The groups' sizes, or None if only the GPU has them, and the number of groups."""
    if ks is None and ks_tensor is None:
        raise ValueError("ks: expected a list, or ks_tensor with the same numbers, got neither")
    from_tensor = None
    if ks_tensor is not None:
        groups = len(ks) if isinstance(ks, Sequence) else checks.tensor("ks_tensor", ks_tensor).numel()
        checks.int32("ks_tensor", ks_tensor, "groups", groups)
        from_tensor = tuple(ks_tensor.tolist()) if checks.on_host(ks_tensor) else None
    if ks is None:
        if from_tensor is not None:
            checks.depths("ks_tensor", from_tensor)
        return from_tensor, groups
    sizes = checks.integers("ks", ks)
    checks.depths("ks", sizes)
    if from_tensor is not None and from_tensor != sizes:
        raise ValueError(f"ks_tensor: expected the numbers of ks, {sizes}, got {from_tensor}")
    return sizes, len(sizes)
