"""Operators of products of heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.operators import operator
from ..ops import c_of, recipes_of
from . import api as heads
from .check import ALONG_TOKENS, check_along_tokens, heads_problem


def new(
    expr: str, a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, c: Tensor | None, recipe: Sequence[int]
) -> Tensor | None:
    """Multiply into a new output."""
    return heads.fp8_einsum(expr, (a, sfa), (b, sfb), None, c, tuple(recipe))


def into(
    expr: str,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    d: Tensor,
    c: Tensor | None,
    recipe: Sequence[int],
    adds_to_d: bool = False,
) -> None:
    """Multiply into the caller's output."""
    heads.fp8_einsum(expr, (a, sfa), (b, sfb), d, c_of(d, c, adds_to_d), tuple(recipe))


def fake_new(
    expr: str, a: Tensor, sfa: Tensor, b: Tensor, sfb: Tensor, c: Tensor | None, recipe: Sequence[int]
) -> Tensor:
    """Stand for the product."""
    if expr == ALONG_TOKENS:
        check_along_tokens((a, sfa), (b, sfb), None, c, tuple(recipe))
        return torch.empty((a.shape[1], a.shape[2], b.shape[2]), dtype=torch.float32, device=a.device)
    return heads_problem(expr, (a, sfa), (b, sfb), None, c, recipes_of(recipe)).d.transpose(0, 1)


def fake_into(
    expr: str,
    a: Tensor,
    sfa: Tensor,
    b: Tensor,
    sfb: Tensor,
    d: Tensor,
    c: Tensor | None,
    recipe: Sequence[int],
    adds_to_d: bool = False,
) -> None:
    """Stand for the product."""
    if expr == ALONG_TOKENS:
        check_along_tokens((a, sfa), (b, sfb), d, c, tuple(recipe))
    else:
        heads_problem(expr, (a, sfa), (b, sfb), d, c_of(d, c, adds_to_d), recipes_of(recipe))


OPERANDS = "str expr, Tensor a, Tensor sfa, Tensor b, Tensor sfb"
operator(f"fp8_einsum({OPERANDS}, Tensor? c, int[] recipe) -> Tensor", new, fake_new)
operator(
    f"fp8_einsum.into({OPERANDS}, Tensor(d!) d, Tensor? c, int[] recipe, bool adds_to_d=False) -> ()", into, fake_into
)
