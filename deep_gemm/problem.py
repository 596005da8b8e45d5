"""What is asked of a product: its operands and sizes. Every mistake of a caller is raised here, in words.

Each function takes what a caller passed and returns a problem that is right: shapes agree, types and addresses are
what the kernels need, the output exists and overlaps nothing that it must not. Nothing is written before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks
from .checks import Operand, Sizes
from .integers import INT32_MAX, as_integer, integer_in_range
from .layout import PER_BLOCK, PER_ROW, RECIPE_1D1D, RECIPE_1D2D, SCALE_BLOCK, Recipe, ceil_div, recipe_numbers
from .settings import get_mk_alignment_for_contiguous_layout

ZERO_PADDING_BLOCK = 128
ORDINARY_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Recipes = tuple[Recipe | None, Recipe | None, Recipe | None]
"""What a caller said of scales: of both sides, of A alone, of B alone."""
NO_RECIPES: Recipes = (None, None, None)


class DenseProblem(NamedTuple):
    """D = C + A @ B.T, with A `[m, k]`, B `[n, k]` and D `[m, n]`."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    c: Tensor | None
    m: int
    n: int
    k: int
    sfb_rows: int
    """Rows of B under one scale: 128 (1D2D) or 1 (1D1D)."""


class ContiguousProblem(NamedTuple):
    """Rows of A `[m, k]` stacked by group, each multiplied by its group's B `[groups, n, k]`."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    grouped_layout: Tensor
    """A group id for each row (-1: skip it), or with `layout_is_ends` the end of each group's rows."""
    num_groups: int
    m: int
    n: int
    k: int
    sfb_rows: int
    layout_is_ends: bool
    alignment: int
    """Rows that group starts (offsets form) and zero padding are aligned to."""
    zero_padding: bool


class MaskedProblem(NamedTuple):
    """The first `masked_m[g]` rows of each group of A `[groups, max_m, k]`, times B `[groups, n, k]`."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    masked_m: Tensor
    expected_m: int
    num_groups: int
    max_m: int
    n: int
    k: int
    sfb_rows: int


class KGroupedProblem(NamedTuple):
    """D[g] = C[g] + A_g @ B_g.T, with A_g `[m, k_g]` and B_g `[n, k_g]` stored one group after another."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    c: Tensor | None
    ks: tuple[int, ...] | None
    """The groups' k where the caller has them on the host; `ks_tensor` has them otherwise."""
    ks_tensor: Tensor | None
    num_groups: int
    m: int
    n: int


def dense_problem(
    a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, *, major: str = "nt", recipes: Recipes = NO_RECIPES
) -> DenseProblem:
    """Check a dense product. `major` says how A (n: `[m, k]`) and B (t: `[n, k]`) are given, else transposed."""
    sizes: Sizes = {}
    sfb_rows = _sfb_rows(recipes)
    turn_a, turn_b = major[0] == "t", major[1] == "n"
    av, sfa = checks.operand("a", a, ("k", "m") if turn_a else ("m", "k"), sizes)
    bv, sfb = checks.operand("b", b, ("k", "n") if turn_b else ("n", "k"), sizes)
    av, bv = av.mT if turn_a else av, bv.mT if turn_b else bv
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    sfa = checks.scales("sfa", sfa, "m", (m,), k, 1, transposed=turn_a)
    sfb = checks.scales("sfb", sfb, "n", (n,), k, sfb_rows, transposed=turn_b)
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    d, c = checks.outputs(inputs, d, c, ("m", "n"), sizes, _default_dtype(sfb_rows))
    checks.depth(k)
    av = checks.k_major("a", av, copy_if_transposed=turn_a)
    bv = checks.k_major("b", bv, copy_if_transposed=turn_b)
    return DenseProblem(av, sfa, bv, sfb, d, c, m, n, k, sfb_rows)


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
) -> ContiguousProblem:
    """Check a product grouped along m with the groups' rows stacked."""
    sizes: Sizes = {}
    sfb_rows = _sfb_rows(recipes)
    turn_b = major[1] == "n"
    av, sfa = checks.operand("a", a, ("m", "k"), sizes)
    bv, sfb = checks.operand("b", b, ("groups", "k", "n") if turn_b else ("groups", "n", "k"), sizes)
    bv = bv.mT if turn_b else bv
    m, n, k, groups = sizes["m"], sizes["n"], sizes["k"], sizes["groups"]
    if num_groups is not None and as_integer(num_groups) != groups:
        raise ValueError(f"num_groups: expected the {groups} groups of b, got {num_groups!r}")
    sfa = checks.scales("sfa", sfa, "m", (m,), k, 1)
    sfb = checks.scales("sfb", sfb, "n", (groups, n), k, sfb_rows, transposed=turn_b)
    if grouped_layout is None:  # consecutive groups of equal size; ids, because the ends of a group may not be aligned
        grouped_layout, use_psum_layout = _equal_groups(m, groups, av.device), False
    axis = "groups" if use_psum_layout else "m"
    checks.int32("grouped_layout", grouped_layout, axis, sizes[axis])
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb, "grouped_layout": grouped_layout}
    d, _ = checks.outputs(inputs, d, None, ("m", "n"), sizes, _default_dtype(sfb_rows))
    checks.depth(k)
    alignment = get_mk_alignment_for_contiguous_layout() if use_psum_layout else ZERO_PADDING_BLOCK
    if grouped_layout.device.type == "cpu":
        if use_psum_layout:
            checks.ends(grouped_layout, m, alignment)
        else:
            checks.in_range("grouped_layout", grouped_layout, -1, groups - 1)
    av = checks.k_major("a", av)
    bv = checks.k_major("b", bv, copy_if_transposed=turn_b)
    return ContiguousProblem(
        av,
        sfa,
        bv,
        sfb,
        d,
        grouped_layout,
        groups,
        m,
        n,
        k,
        sfb_rows,
        use_psum_layout,
        alignment,
        ensure_zero_padding,
    )


def masked_problem(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    masked_m: Tensor | None,
    expected_m: int | None,
    *,
    recipes: Recipes = NO_RECIPES,
) -> MaskedProblem:
    """Check a product grouped along m with a row count for each group."""
    sizes: Sizes = {}
    sfb_rows = _sfb_rows(recipes)
    av, sfa = checks.operand("a", a, ("groups", "max_m", "k"), sizes)
    bv, sfb = checks.operand("b", b, ("groups", "n", "k"), sizes)
    groups, max_m, n, k = sizes["groups"], sizes["max_m"], sizes["n"], sizes["k"]
    sfa = checks.scales("sfa", sfa, "max_m", (groups, max_m), k, 1)
    sfb = checks.scales("sfb", sfb, "n", (groups, n), k, sfb_rows)
    masked_m = checks.int32("masked_m", masked_m, "groups", groups)
    expected_m = max_m if expected_m is None else integer_in_range("expected_m", expected_m, 0, INT32_MAX)
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb, "masked_m": masked_m}
    d, _ = checks.outputs(inputs, d, None, ("groups", "max_m", "n"), sizes, _default_dtype(sfb_rows))
    checks.depth(k)
    if masked_m.device.type == "cpu":
        checks.in_range("masked_m", masked_m, 0, max_m)
    av, bv = checks.k_major("a", av), checks.k_major("b", bv)
    return MaskedProblem(av, sfa, bv, sfb, d, masked_m, expected_m, groups, max_m, n, k, sfb_rows)


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
) -> KGroupedProblem:
    """Check a product grouped along k. Scales are `[m, blocks of k]`, or `[blocks of k, m]` if not `k_major_scales`."""
    if recipe is not None and recipe_numbers("recipe", recipe) != RECIPE_1D1D:
        raise NotImplementedError(f"recipe: expected {RECIPE_1D1D} for a k-grouped product, got {tuple(recipe)}")
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
    else:  # only the GPU knows the sizes: the host takes their sum from the values
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
    d, c = checks.outputs(inputs, d, c, ("groups", "m", "n"), sizes, torch.float32, dtypes=(torch.float32,))
    return KGroupedProblem(av, sfa, bv, sfb, d, c, host_ks, ks_tensor, num_groups, m, n)


def check_ordinary_matrices(a: Tensor, b: Tensor, d: Tensor, c: Tensor | None, major: str) -> None:
    """Check a product of ordinary tensors, which torch computes."""
    sizes: Sizes = {}
    given = {"a": a, "b": b, "d": d} if c is None else {"a": a, "b": b, "d": d, "c": c}
    a_axes = ("m", "k") if major[0] == "n" else ("k", "m")
    b_axes = ("n", "k") if major[1] == "t" else ("k", "n")
    for (name, x), axes in zip(given.items(), (a_axes, b_axes, ("m", "n"), ("m", "n")), strict=False):
        checks.bind(name, checks.tensor(name, x), axes, sizes)
    checks.same_device(given, a.device)
    checks.has_type("a", a, ORDINARY_TYPES)
    if b.dtype != a.dtype:
        raise ValueError(f"b: expected dtype {a.dtype}, which a has, got {b.dtype}")
    checks.has_type("d", d, (a.dtype, torch.float32) if a.element_size() == 2 else (a.dtype,))
    if c is not None and c.dtype != d.dtype:
        raise ValueError(f"c: expected dtype {d.dtype}, which d has, got {c.dtype}")
    checks.apart("d", d)
    checks.no_overlap({"a": a, "b": b}, d, c)


# Recipes and defaults


def _sfb_rows(recipes: Recipes) -> int:
    """Rows of B under one scale, from the recipe or from one for each side."""
    if recipes == NO_RECIPES:
        return SCALE_BLOCK
    names = ("recipe", "recipe_a", "recipe_b")
    allowed = ((RECIPE_1D2D, RECIPE_1D1D), (PER_ROW,), (PER_ROW, PER_BLOCK))
    stated: list[tuple[int, ...] | None] = []
    for name, recipe in zip(names, recipes, strict=True):
        stated.append(None if recipe is None else recipe_numbers(name, recipe))
    for name, numbers, known in zip(names, stated, allowed, strict=True):
        if numbers is not None and numbers not in known:
            raise NotImplementedError(f"{name}: expected {' or '.join(map(str, known))}, got {numbers}")
    both, _, of_b = stated
    if both is None:
        return int(of_b[0]) if of_b is not None else SCALE_BLOCK
    if of_b is not None and of_b[0] != both[1]:
        raise ValueError(f"recipe_b: expected what recipe {both} says, got {of_b}")
    return int(both[1])


def _default_dtype(sfb_rows: int) -> torch.dtype:
    return torch.float32 if sfb_rows == 1 else torch.bfloat16


def _equal_groups(m: int, groups: int, device: torch.device) -> Tensor:
    """Make the ids of consecutive groups of equal size."""
    if m % max(groups, 1):
        raise ValueError(f"grouped_layout: left out, so m must be a multiple of the {groups} groups, got m = {m}")
    return torch.arange(groups, dtype=torch.int32, device=device).repeat_interleave(m // max(groups, 1))


def _group_sizes(ks: Sequence[int] | None, ks_tensor: Tensor | None) -> tuple[tuple[int, ...] | None, int]:
    """Sizes where the host has them, in a list or in a CPU tensor, and how many groups there are."""
    if ks is None and ks_tensor is None:
        raise ValueError("ks: expected a list, or ks_tensor with the same numbers, got neither")
    from_tensor = None
    if ks_tensor is not None:
        groups = len(ks) if isinstance(ks, Sequence) else checks.tensor("ks_tensor", ks_tensor).numel()
        checks.int32("ks_tensor", ks_tensor, "groups", groups)
        from_tensor = tuple(ks_tensor.tolist()) if ks_tensor.device.type == "cpu" else None
    if ks is None:
        if from_tensor is not None:
            checks.depths("ks_tensor", from_tensor)
        return from_tensor, groups
    sizes = _integers("ks", ks)
    checks.depths("ks", sizes)
    if from_tensor is not None and from_tensor != sizes:
        raise ValueError(f"ks_tensor: expected the numbers of ks, {sizes}, got {from_tensor}")
    return sizes, len(sizes)


def _integers(name: str, given: Sequence[int]) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        given = given.tolist()
    numbers = [as_integer(x) for x in given] if isinstance(given, Sequence) else [None]
    sizes = tuple(x for x in numbers if x is not None)
    if len(sizes) != len(numbers):
        raise ValueError(f"{name}: expected a list of integers, got {given!r}")
    return sizes
