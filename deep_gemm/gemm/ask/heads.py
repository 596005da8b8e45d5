"""Checks of calls of products of heads, a matrix for each, and of products into the parts of heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Operand, Sizes
from ...core.check.layout import RECIPE_1D1D, SCALE_BLOCK, Recipe, ceil_div
from ...core.check.numbers import as_integer
from ...core.check.recipes import FOR_ROWS_OF_B, NO_RECIPES, PER_BLOCK, PER_ROW, Recipes, scales_of_b
from ..kinds.epilogues import TO_HEADS
from ..kinds.output import types_of_b
from ..kinds.works import HEADS
from ..problem import MID_MULTIPLE, HeadParts, Problem

EXPRESSIONS = ("bhr,hdr->bhd", "bhd,hdr->bhr", "bhd,bhr->hdr")
BY_HEADS, BY_HEADS_TURNED, ALONG_TOKENS = EXPRESSIONS


def expression(expr: object, known: tuple[str, ...] = EXPRESSIONS) -> str:
    """Check which of the known products are meant."""
    stated = expr.replace(" ", "") if isinstance(expr, str) else expr
    if stated not in known:
        raise NotImplementedError(f"expr: expected {', '.join(known[:-1])} or {known[-1]}, got {expr!r}")
    return str(stated)


def heads_problem(
    expr: str, a: Operand, b: Operand, d: Tensor | None, c: Tensor | None = None, recipes: Recipes = NO_RECIPES
) -> Problem:
    """Check a product of each head's rows with its weights. A D that is left out is `[b, h, n]`, contiguous.

    A, D and C lie as their callers have them, so that heads may lie inside of rows.
    """
    of_a, of_b = expr.partition("->")[0].split(",")
    inner, turned = of_a[2], of_b[1] == of_a[2]
    outer = of_b[1] if not turned else of_b[2]
    sizes: Sizes = {}
    scales = scales_of_b(recipes)
    av, sfa = checks.operand("a", a, tuple(of_a), sizes)
    bv, sfb = checks.operand("b", b, tuple(of_b), sizes, types_of_b(HEADS, PER_ROW, scales))
    m, heads, n, k = sizes["b"], sizes["h"], sizes[outer], sizes[inner]
    blocks = ceil_div(k, SCALE_BLOCK)
    _scales("sfa", sfa, f"b, h, ceil({inner} / 128)", (m, heads, blocks))
    of_rows = f"ceil({outer} / {scales.rows})" if scales.rows > 1 else outer
    names, shape = [of_rows, f"ceil({inner} / 128)"], [ceil_div(n, scales.rows), blocks]
    if turned:
        names, shape = names[::-1], shape[::-1]
    of_each_row = (heads, blocks, n) if turned else (heads, n, blocks)
    hint = FOR_ROWS_OF_B if sfb.shape == of_each_row else ""
    _scales("sfb", sfb, f"h, {', '.join(names)}", (heads, *shape), hint)
    bv, sfb = (bv.mT, sfb.mT) if turned else (bv, sfb)
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    # An output is checked by the names of a product: n is what TMA stores.
    d, c = checks.outputs(inputs, d, c, ("b", "h", "n"), {"b": m, "h": heads, "n": n}, torch.bfloat16)
    checks.multiple(inner, k, checks.K_MULTIPLE)
    checks.k_major("a", av)
    bv = checks.weights("b", bv, copy_if_transposed=turned)
    a_of_heads, sfa, d_of_heads = (x.transpose(0, 1) for x in (av, sfa, d))
    c_of_heads = None if c is None else c.transpose(0, 1)
    return Problem(a_of_heads, sfa, bv, sfb, d_of_heads, c_of_heads, HEADS, scales)


def check_along_tokens(a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipe: Recipe) -> tuple[int, int]:
    """Check a product of each head's columns, and give the numbers of tokens and heads."""
    if scales_of_b((recipe, None, None)) != PER_ROW:
        raise NotImplementedError(f"recipe: expected {RECIPE_1D1D} for {ALONG_TOKENS}, got {recipe}")
    sizes: Sizes = {}
    inputs: dict[str, Tensor] = {}
    of_a, of_b = ALONG_TOKENS.partition("->")[0].split(",")
    for name, operand, axes in (("a", a, of_a), ("b", b, of_b)):
        values, scales = checks.operand(name, operand, tuple(axes), sizes)
        tokens, heads, width = values.shape
        _scales(f"sf{name}", scales, f"ceil(b / 128), h, {axes[2]}", (ceil_div(tokens, SCALE_BLOCK), heads, width))
        checks.supported_device(name, values)
        inputs |= {name: values, f"sf{name}": scales}
    for name, x in {"d": d, "c": c}.items():
        if x is not None:
            checks.bind(name, checks.tensor(name, x), ("h", "d", "r"), sizes)
    if d is not None:
        checks.no_overlap(inputs, d, c)  # here, because the product of groups along k sees copies
    return sizes["b"], sizes["h"]


def _scales(name: str, sf: Tensor, axes: str, expected: tuple[int, ...], hint: str = "") -> None:
    checks.fp32_scales(name, sf)
    if sf.shape != expected:
        raise ValueError(f"{name}: expected shape ({axes}) = {expected}, got {tuple(sf.shape)}{hint}")


PART_MULTIPLE = 16
"""Columns of a part: the narrowest panels that kernels store."""


def skip_problem(a: Operand, b: Operand, d: Tensor | None, head_splits: Sequence[int], *, recipes: Recipes) -> Problem:
    """Check a product whose D has columns between the parts of heads."""
    sizes: Sizes = {}
    if scales_of_b(recipes) != PER_BLOCK:
        raise NotImplementedError(f"recipe: expected (1, 128, 128) or None, got {recipes[0]}")
    av, sfa = checks.operand("a", a, ("m", "k"), sizes)
    bv, sfb = checks.operand("b", b, ("n", "k"), sizes)
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    heads = heads_of(head_splits)
    if n % heads.columns:
        raise ValueError(f"n: expected a multiple of left + right = {heads.columns} of head_splits, got {n}")
    sfa = checks.scales("sfa", sfa, "m", (m,), k, 1)
    sfb = checks.scales("sfb", sfb, "n", (n,), k, SCALE_BLOCK)
    inputs = {"a": av, "sfa": sfa, "b": bv, "sfb": sfb}
    d = checks.tensor("d", d)  # required, as the columns between the parts are the caller's
    checks.has_type("d", d, (torch.bfloat16,))
    columns = n // heads.columns * heads.columns_of_d
    if d.shape != (m, columns):
        expected = f"(m, n / (left + right) * (left + mid + right)) = ({m}, {columns})"
        raise ValueError(f"d: expected shape {expected}, got {tuple(d.shape)}")
    # The rules of any D, for the number of columns that this D has.
    checks.outputs(inputs, d, None, ("m", "n"), {"m": m, "n": columns}, torch.bfloat16)
    checks.depth(k)
    av, bv = checks.k_major("a", av), checks.k_major("b", bv)
    return Problem(av, sfa, bv, sfb, d, epilogue=TO_HEADS, heads=heads)


def heads_of(head_splits: Sequence[int]) -> HeadParts:
    """Check the columns of a head's left part, middle and right part."""
    given = list(head_splits) if isinstance(head_splits, Sequence) else []
    numbers = [as_integer(x) for x in given]
    splits = [x for x in numbers if x is not None]
    if len(given) != 3 or len(splits) != 3:
        raise ValueError(f"head_splits: expected three integers (left, mid, right), got {head_splits!r}")
    left, mid, right = splits
    are_multiples = left % PART_MULTIPLE == right % PART_MULTIPLE == mid % MID_MULTIPLE == 0
    if left <= 0 or mid < 0 or right <= 0 or not are_multiples:
        raise ValueError(
            f"head_splits: expected left and right of at least {PART_MULTIPLE}, multiples of it, and mid a multiple of "
            f"{MID_MULTIPLE}, got {tuple(splits)}"
        )
    return HeadParts(left, mid, right)
