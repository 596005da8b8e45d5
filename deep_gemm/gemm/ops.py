"""The common parts of operators of products: their operands, and how a product is computed or only asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..core.check.recipes import Recipes
from .product import Product, run

OPERANDS = "Tensor a, Tensor sfa, Tensor b, Tensor sfb"
Compute = Callable[..., Tensor | None]
"""`(a, b, d, c, said) -> d`, or None where the caller gave d, as `run` has it; of layers, as their functions."""


def real_and_fake(product: Product) -> tuple[Compute, Compute]:
    """Give what computes a product, and what asks the same without an answer."""

    def ask(a: Any, b: Any, d: Tensor | None, c: Tensor | None, said: Any) -> Tensor | None:
        problem = product.ask(a, b, d, c, said)
        return problem.d if d is None else None

    return partial(run, product), ask


def recipes_of(recipe: Sequence[int] | None) -> Recipes:
    """Give the recipes of `whole_recipe`: one for both sides, or of four numbers two for each."""
    if recipe is not None and len(recipe) == 4:
        return None, tuple(recipe[:2]), tuple(recipe[2:])
    return None if recipe is None else tuple(recipe), None, None


def c_of(d: Tensor, c: Tensor | None, adds_to_d: bool) -> Tensor | None:
    """Give the C of an operator that writes D. As D it could not be passed: D is written, and C is not."""
    if adds_to_d and c is not None:
        raise ValueError("c: expected None with adds_to_d, got a tensor")
    return d if adds_to_d else c
