"""Products whose D has columns between the two parts of each head, which nobody writes: what is asked, checked."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.check import checks
from ...core.check.checks import Operand, Sizes
from ...core.check.integers import as_integer
from ...core.check.layout import SCALE_BLOCK, ceil_div
from ...core.check.recipes import PER_BLOCK, Recipes, Scales, scales_of_b

PART_MULTIPLE = 16
"""Columns of a part: the narrowest panels that kernels store."""
MID_MULTIPLE = 8
"""Columns between parts: 16 bytes of BF16, at multiples of which alone TMA sees something begin."""


class HeadParts(NamedTuple):
    """Columns of each head of D: the product has those of the left and the right part, D has a middle between them."""

    left: int
    mid: int
    right: int

    @property
    def columns(self) -> int:
        """Columns of the product in each head."""
        return self.left + self.right

    @property
    def columns_of_d(self) -> int:
        """Columns of D in each head."""
        return self.left + self.mid + self.right

    @property
    def part_multiple(self) -> int:
        """Columns of which both parts are multiples."""
        return gcd(self.left, self.right)

    @property
    def division(self) -> tuple[int, int]:
        """A multiplier and a shift that divide by `columns`: `column // 8 * multiplier >> shift`.

        With N = 2^(29 + s), 2^s no less than u = columns / 8, and M = ceil(N / u): M / N is above 1 / u by less than
        1 / N, so for c below 2^29 c * M / N is above c / u by less than 2^-s, which is at most 1 / u. So no whole
        number lies between them.
        """
        units = self.columns // MID_MULTIPLE
        shift = 29 + (units - 1).bit_length()
        return ceil_div(1 << shift, units), shift


def parts(d: Tensor, heads: HeadParts) -> tuple[Tensor, Tensor]:
    """The left and the right parts of D's heads: `[m, number of heads, columns]`."""
    of_heads = d.view(d.shape[0], d.shape[1] // heads.columns_of_d, heads.columns_of_d)
    return of_heads[..., : heads.left], of_heads[..., heads.left + heads.mid :]


class SkipProblem(NamedTuple):
    """A @ B.T, with A `[m, k]` and B `[n, k]`, in the columns of D `[m, n / heads.columns * heads.columns_of_d]`."""

    a: Tensor
    sfa: Tensor
    b: Tensor
    sfb: Tensor
    d: Tensor
    c: None
    m: int
    n: int
    k: int
    of_b: Scales
    heads: HeadParts


def skip_problem(
    a: Operand, b: Operand, d: Tensor | None, head_splits: Sequence[int], *, recipes: Recipes
) -> SkipProblem:
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
    return SkipProblem(av, sfa, bv, sfb, d, None, m, n, k, PER_BLOCK, heads)


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
