"""Products whose D has columns between the two parts of each head, which nobody writes: what is asked, checked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Operand, Sizes
from ...core.check.layout import SCALE_BLOCK
from ...core.check.numbers import as_integer
from ...core.check.recipes import PER_BLOCK, Recipes, scales_of_b
from ..kinds.epilogues import TO_HEADS
from ..problem import MID_MULTIPLE, HeadParts, Problem

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
    d = checks.tensor("d", d)  # whoever calls says what its columns between the parts hold
    checks.has_type("d", d, (torch.bfloat16,))
    columns = n // heads.columns * heads.columns_of_d
    if d.shape != (m, columns):
        expected = f"(m, n / (left + right) * (left + mid + right)) = ({m}, {columns})"
        raise ValueError(f"d: expected shape {expected}, got {tuple(d.shape)}")
    # As `outputs` asks it, with the columns that D has.
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
