"""Operators of products of groups along k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...core.operators import Kernel, operator
from ..ops import OPERANDS, Compute, c_of
from ..product import run
from . import launch as depths


def kernels(compute: Compute) -> tuple[Kernel, Kernel]:
    """Give the product as its two operators take it."""

    def new(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        ks: Sequence[int] | None = None,
        ks_tensor: Tensor | None = None,
        c: Tensor | None = None,
        *,
        recipe: Sequence[int] | None = None,
        k_major_scales: bool = True,
    ) -> Tensor | None:
        return compute(k_major_scales, (a, sfa), (b, sfb), None, c, (as_key(recipe),), ks_tensor, ks)

    def into(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        d: Tensor,
        ks: Sequence[int] | None = None,
        ks_tensor: Tensor | None = None,
        c: Tensor | None = None,
        *,
        adds_to_d: bool = False,
        recipe: Sequence[int] | None = None,
        k_major_scales: bool = True,
    ) -> None:
        compute(k_major_scales, (a, sfa), (b, sfb), d, c_of(d, c, adds_to_d), (as_key(recipe),), ks_tensor, ks)

    return new, into


def as_key(recipe: Sequence[int] | None) -> Sequence[int] | None:
    """Give a recipe as a part of what plans are found by: an operator gets a list."""
    return None if recipe is None else tuple(recipe)


def real(k_major_scales: bool, *call: Any) -> Tensor | None:
    """Compute the product, of scales that lie either way."""
    return run(depths.OPERATORS[k_major_scales], *call)


def fake(k_major_scales: bool, a: Any, b: Any, d: Tensor | None, *call: Any) -> Tensor | None:
    """Ask what `real` computes, without an answer."""
    problem = depths.OPERATORS[k_major_scales].ask(a, b, d, *call)
    return problem.d if d is None else None


(new, into), (fake_new, fake_into) = kernels(real), kernels(fake)
NAME = "k_grouped_fp8_gemm_nt_contiguous"
GROUPS = "SymInt[]? ks=None, Tensor? ks_tensor=None, Tensor? c=None"
SCALED = "int[]? recipe=None, bool k_major_scales=True"
operator(f"{NAME}({OPERANDS}, {GROUPS}, *, {SCALED}) -> Tensor", new, fake_new)
operator(f"{NAME}.into({OPERANDS}, Tensor(d!) d, {GROUPS}, *, bool adds_to_d=False, {SCALED}) -> ()", into, fake_into)
