"""What of a call decides whether it is right and which plan runs it, so that a call like one before is cheap."""

from __future__ import annotations

from torch import Tensor

from .problem import NO_RECIPES, Recipes
from .problem.checks import Operand
from .settings import generation


def signature_of(
    kind: object, a: Operand, b: Operand, d: Tensor | None, c: Tensor | None, recipes: Recipes
) -> tuple[object, ...]:
    """Everything that decides whether a call is right and which plan runs it, but for addresses. Empty if malformed.

    `kind` names the product, with what else the caller said of it; `c` is a C, or a layout of groups.
    """
    try:
        (x, sx), (y, sy) = a, b
        stated: tuple[object, ...] = recipes
        if recipes != NO_RECIPES:
            stated = tuple(None if r is None else tuple(r) for r in recipes)
            hash(stated)  # a recipe may hold anything
        return (
            kind,
            stated,
            generation(),
            x.shape,
            x.stride(),
            x.dtype,
            x.get_device(),
            sx.shape,
            sx.stride(),
            sx.dtype,
            sx.get_device(),
            y.shape,
            y.stride(),
            y.dtype,
            y.get_device(),
            sy.shape,
            sy.stride(),
            sy.dtype,
            sy.get_device(),
            None if d is None else (d.shape, d.stride(), d.dtype, d.get_device()),
            None if c is None else (c.shape, c.stride(), c.dtype, c.get_device(), c is d),
        )
    except (TypeError, ValueError, AttributeError):
        return ()
