"""Checks of calls of products of grouped rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.check import checks, ue8m0
from ...core.check.checks import Axes, Operand, Sizes
from ...core.check.numbers import INT32_MAX, as_integer, integer_in_range
from ...core.check.recipes import (
    FOR_ROWS_OF_B,
    MX,
    NO_RECIPES,
    PER_ROW,
    Recipes,
    Scales,
    default_dtype,
    scales_of,
    taken,
)
from ...core.settings import get_mk_alignment_for_contiguous_layout
from ...core.shadow import plain
from .. import packed
from ..fine_scales import as_kernels_take_it
from ..kinds.output import types_of_b
from ..kinds.works import COUNTS, ENDS, IDS, Work
from ..problem import Problem

ZERO_PADDING_BLOCK = 128


def contiguous_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    grouped_layout: Tensor | None,
    *,
    num_groups: int | None = None,
    major: str = "nt",
    recipes: Recipes = NO_RECIPES,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    alignment: int | None = None,
    of_a: Scales = PER_ROW,
    bias: Tensor | None = None,
) -> Problem:
    """Check a product grouped along m whose groups' rows are stacked.

    `alignment` applies to group starts in the offsets form, and is the one in force if it is None. With ids, zero
    padding always fills blocks of 128 rows.
    `of_a`: scales of A, if they are finer than the recipe says.
    """
    sizes: Sizes = {}
    turn_b = major[1] == "n"
    work = ENDS if use_psum_layout and grouped_layout is not None else IDS
    (av, sfa), (bv, sfb), of_a, of_b, default = _operands(work, a, b, ("m",), sizes, recipes, turn_b, of_a)
    m, k, groups = sizes["m"], sizes["k"], sizes["groups"]
    is_fp4 = bv.dtype == torch.uint8
    if num_groups is not None and as_integer(num_groups) != groups:
        raise ValueError(f"num_groups: expected the {groups} groups of b, got {num_groups!r}")
    if grouped_layout is None and num_groups is None:
        raise TypeError("grouped_layout: expected a tensor, or num_groups for groups of equal size, got None")
    if grouped_layout is None:  # consecutive groups of equal size; ids, because their ends may not be aligned
        if m % max(groups, 1):
            raise ValueError(f"grouped_layout: left out, so m must be a multiple of the {groups} groups, got m = {m}")
        ids = torch.arange(groups, dtype=torch.int32, device=av.device)
        grouped_layout = ids.repeat_interleave(m // max(groups, 1))
    axis = "m" if work.reads_ids else "groups"
    checks.int32("grouped_layout", grouped_layout, axis, sizes[axis])
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb, "grouped_layout": grouped_layout}
    bias = checks.bias("bias", bias, ("groups", "n"), sizes, inputs)
    d, _ = checks.outputs(inputs, d, None, ("m", "n"), sizes, default)
    checks.depth(k)
    alignment = check_groups(work, grouped_layout, sizes, alignment)
    av = checks.k_major("a", av)
    bv = checks.weights("b", bv, copy_if_transposed=turn_b and not is_fp4)
    if is_fp4:
        av, sfa, bv, sfb, of_a = as_kernels_take_it(av, sfa, bv, sfb, of_a)
    return Problem(
        av,
        sfa,
        bv,
        sfb,
        d,
        grouped_layout,
        work,
        of_b,
        of_a,
        expected_m=plain(m) / max(groups, 1),
        alignment=alignment,
        zero_padding=ensure_zero_padding,
        bias=bias,
    )


def check_groups(work: Work, layout: Tensor, sizes: Sizes, alignment: int | None) -> int:
    """Check the groups' ids or ends, if the host can read them, and give the alignment that is in force."""
    if work.reads_ids:
        if checks.on_host(layout):
            checks.in_range("grouped_layout", layout, -1, sizes["groups"] - 1)
        return ZERO_PADDING_BLOCK
    alignment = get_mk_alignment_for_contiguous_layout() if alignment is None else alignment
    if checks.on_host(layout):
        checks.ends(layout, sizes["m"], alignment)
    return alignment


def masked_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    masked_m: Tensor | None,
    expected_m: int | None,
    *,
    recipes: Recipes = NO_RECIPES,
    bias: Tensor | None = None,
) -> Problem:
    """Check a product grouped along m with a row count for each group."""
    sizes: Sizes = {}
    (av, sfa), (bv, sfb), of_a, of_b, default = _operands(COUNTS, a, b, ("groups", "max_m"), sizes, recipes)
    groups, max_m, k = sizes["groups"], sizes["max_m"], sizes["k"]
    masked_m = checks.int32("masked_m", masked_m, "groups", groups)
    expected_m = max_m if expected_m is None else integer_in_range("expected_m", expected_m, 0, INT32_MAX)
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb, "masked_m": masked_m}
    bias = checks.bias("bias", bias, ("groups", "n"), sizes, inputs)
    d, _ = checks.outputs(inputs, d, None, ("groups", "max_m", "n"), sizes, default)
    checks.depth(k)
    if checks.on_host(masked_m):
        checks.in_range("masked_m", masked_m, 0, max_m)
    av, bv = checks.k_major("a", av), checks.weights("b", bv)
    if bv.dtype == torch.uint8:
        av, sfa, bv, sfb, of_a = as_kernels_take_it(av, sfa, bv, sfb, of_a)
    return Problem(av, sfa, bv, sfb, d, masked_m, COUNTS, of_b, of_a, expected_m=expected_m, bias=bias)


def _operands(
    work: Work,
    a: Operand,
    b: Operand,
    rows: Axes,
    sizes: Sizes,
    recipes: Recipes,
    turn_b: bool = False,
    finest_of_a: Scales = PER_ROW,
) -> tuple[Operand, Operand, Scales, Scales, torch.dtype]:
    """Check A `[*rows, k]` and B, which may be FP4, as `[groups, n, k]`; give how each is scaled, and D's type."""
    av, sfa = checks.operand("a", a, (*rows, "k"), sizes)
    outer, k = tuple(av.shape[:-1]), sizes["k"]
    axes = ("groups", "k", "n") if turn_b else ("groups", "n", "k")
    if packed.is_packed(b):
        of_a, of_b = min(finest_of_a, packed.scales_beside(recipes)), MX
        weight = packed.weight("b", b, axes, sizes, turned=turn_b)
        sfa = ue8m0.scales("sfa", sfa, rows[-1], outer, k, of_a, MX)
        return (av, sfa), weight, *taken(of_a, of_b), torch.bfloat16
    of_a, of_b = scales_of(recipes)
    bv, sfb = checks.operand("b", b, axes, sizes, types_of_b(work, *taken(of_a, of_b)))
    of_a = min(finest_of_a, of_a)
    sfa = ue8m0.scales("sfa", sfa, rows[-1], outer, k, of_a, of_b)
    of_groups = sizes["groups"], sizes["n"]
    sfb = ue8m0.scales("sfb", sfb, "n", of_groups, k, of_b, of_a, transposed=turn_b, hint=FOR_ROWS_OF_B)
    return (av, sfa), (bv.mT if turn_b else bv, sfb), *taken(of_a, of_b), default_dtype(of_b)
