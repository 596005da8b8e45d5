"""Operators of products of groups along k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ...core.check.checks import Operand
from ...core.operators import Kernel, operator
from ..ops import OPERANDS, Compute, c_of
from . import launch as depths
from .check import k_grouped_problem


def ask(
    a: Operand,
    b: Operand,
    d: Tensor | None,
    ks: Sequence[int] | None,
    ks_tensor: Tensor | None,
    c: Tensor | None,
    recipe: Sequence[int] | None,
    k_major_scales: bool,
) -> Tensor | None:
    """Ask what `kernels.depths.run` computes, without an answer."""
    problem = k_grouped_problem(a, b, d, ks, ks_tensor, c, recipe=recipe, k_major_scales=k_major_scales)
    return problem.d if d is None else None


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
        return compute((a, sfa), (b, sfb), None, ks, ks_tensor, c, as_key(recipe), k_major_scales)

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
        compute((a, sfa), (b, sfb), d, ks, ks_tensor, c_of(d, c, adds_to_d), as_key(recipe), k_major_scales)

    return new, into


def as_key(recipe: Sequence[int] | None) -> Sequence[int] | None:
    """Give a recipe as a part of what plans are found by: an operator gets a list."""
    return None if recipe is None else tuple(recipe)


run: Compute = partial(depths.run, keeps_room=False)
(new, into), (fake_new, fake_into) = kernels(run), kernels(ask)
NAME = "k_grouped_fp8_gemm_nt_contiguous"
GROUPS = "SymInt[]? ks=None, Tensor? ks_tensor=None, Tensor? c=None"
SCALED = "int[]? recipe=None, bool k_major_scales=True"
operator(f"{NAME}({OPERANDS}, {GROUPS}, *, {SCALED}) -> Tensor", new, fake_new)
operator(f"{NAME}.into({OPERANDS}, Tensor(d!) d, {GROUPS}, *, bool adds_to_d=False, {SCALED}) -> ()", into, fake_into)
