"""BF16 products as gemm/product.py runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.call import Key, requires_gradient
from ...core.seen import FREE_ROWS, STAYS
from ..launch import run as launch
from ..plan import Plan
from ..product import Product


def bf16_product(
    operator: str,
    ask: Callable[..., Any],
    on_gpu: Callable[[Any], Plan | None] = launch,
    *,
    has_c: bool = True,
    has_layout: bool = False,
    has_gradients: bool = False,
    heads_are_second: bool = False,
    first: Key = (),
    derive: Callable[..., Plan | None] | None = None,
) -> Product:
    """State a product of BF16 and its operator.

    The operator takes `first`, a, b, d if given, then C (for a product without C, the layout), a layout beside C, and
    the caller's other arguments. `heads_are_second`: D is `[b, h, n]`, but a problem has heads first: no plan makes D.
    """

    def as_operator(a: Tensor, b: Tensor, d: Tensor | None, c: Tensor | None, said: Key, *more: Any) -> Tensor | None:
        packet = getattr(torch.ops.deep_gemm, operator)
        others = *more[:1], *said
        if d is None:
            made: Tensor = packet.default(*first, a, b, c, *others)
            return made
        if has_c:
            packet.into(*first, a, b, d, None if c is d else c, *others, c is d)
        else:
            packet.into(*first, a, b, d, c, *others)
        return None

    return Product(
        ask,
        as_operator,
        on_gpu,
        derive=derive,
        has_scales=False,
        has_layout=has_layout,
        has_gradients=has_gradients,
        free=(FREE_ROWS, STAYS, FREE_ROWS, FREE_ROWS),
        wants_checks=requires_gradient,
        serves=lambda plan, turned, problem, call: not (heads_are_second and call[2] is None),
        output_of=lambda problem: problem.d.transpose(0, 1) if heads_are_second else problem.d,
    )
