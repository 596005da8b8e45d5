"""Operators of products of heads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..einsum import PRODUCTS
from ..problem import form_of
from .library import Kernel, operator
from .products import OPERANDS, c_of, real_and_fake

SAID = "Tensor? c=None, *, str expr, int[]? recipe=None"


def kernels(index: int) -> tuple[Kernel, Kernel]:
    """Give what computes products (0), or what asks the same without an answer (1), as the two operators take it."""

    def new(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        c: Tensor | None = None,
        *,
        expr: str,
        recipe: Sequence[int] | None = None,
    ) -> Tensor | None:
        compute = real_and_fake(PRODUCTS[form_of(expr)])[index]
        return compute((a, sfa), (b, sfb), None, c, None if recipe is None else tuple(recipe))

    def into(
        a: Tensor,
        sfa: Tensor,
        b: Tensor,
        sfb: Tensor,
        d: Tensor,
        c: Tensor | None = None,
        *,
        expr: str,
        adds_to_d: bool = False,
        recipe: Sequence[int] | None = None,
    ) -> None:
        compute = real_and_fake(PRODUCTS[form_of(expr)])[index]
        compute((a, sfa), (b, sfb), d, c_of(d, c, adds_to_d), None if recipe is None else tuple(recipe))

    return new, into


(new, into), (fake_new, fake_into) = kernels(0), kernels(1)
operator(f"fp8_einsum({OPERANDS}, {SAID}) -> Tensor", new, fake_new)
operator(f"fp8_einsum.into({OPERANDS}, Tensor(d!) d, {SAID}, bool adds_to_d=False) -> ()", into, fake_into)
