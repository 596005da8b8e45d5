"""BF16 products as gemm/product.py runs them, and those of groups by whichever kernel suits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.call import Key, requires_gradient
from ...core.check.layout import rows_of_counts, rows_of_groups
from ...core.seen import FREE_ROWS, STAYS
from ...core.settings import get_compile_mode
from ..output import Groups
from ..plan import Plan
from ..product import Product
from ..reference import padding_rows
from . import counted as bf16_counted
from . import depths as bf16_depths
from . import rows as bf16_rows
from .check import Bf16DepthsProblem, Bf16RowsProblem
from .config import BLOCK_K


def bf16_product(
    operator: str,
    ask: Callable[..., Any],
    reference: Callable[[Any], None],
    on_gpu: Callable[[Any], Plan | None],
    *,
    has_c: bool = True,
    has_layout: bool = False,
    has_gradients: bool = False,
    heads_are_second: bool = False,
    first: Key = (),
    derive: Callable[..., Plan | None] | None = None,
) -> Product:
    """State a product of BF16 and its operator.

    The operator takes `first`, a, b, (d,) C or, if there is none, the layout in its place, a layout beside C, then what
    the caller said. `heads_are_second`: D is `[b, h, n]`, of which a problem has the heads first, so no plan makes it.
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
        reference,
        on_gpu,
        as_operator,
        derive,
        has_scales=False,
        has_layout=has_layout,
        has_gradients=has_gradients,
        free=(FREE_ROWS, STAYS, FREE_ROWS, FREE_ROWS),
        wants_checks=requires_gradient,
        serves=lambda plan, turned, problem, call: not (heads_are_second and call[2] is None),
        output_of=lambda problem: problem.d.transpose(0, 1) if heads_are_second else problem.d,
    )


def run_rows(p: Bf16RowsProblem) -> Plan | None:
    """Compute a product of grouped rows on a GPU."""
    if p.d.numel() == 0 or len(p.b) == 0:
        return None
    if p.a.shape[-1] == 0:
        if get_compile_mode() == 0:
            p.d.masked_fill_(written_rows(p)[..., None], 0)
        return None
    if p.is_masked:
        return bf16_rows.run(bf16_rows.RowsProblem(p.a, p.b, p.d, p.layout, Groups.COUNTS, p.expected_m, 1))
    groups = Groups.ENDS if p.layout_is_ends else Groups.IDS
    stacked = p.a[None], p.b, p.d[None], p.layout, groups, p.expected_m, p.alignment, p.zero_padding
    return bf16_rows.run(bf16_rows.RowsProblem(*stacked))


def written_rows(p: Bf16RowsProblem) -> Tensor:
    """Tell of each row of D whether the product writes it. The host reads nothing."""
    if p.is_masked:
        return rows_of_counts(p.layout, p.a.shape[1])
    is_owned = rows_of_groups(p.layout, len(p.a), p.alignment) if p.layout_is_ends else p.layout >= 0
    if not p.zero_padding or len(is_owned) == 0:
        return is_owned
    return is_owned | padding_rows(is_owned.int() - 1, p.alignment)


def run_depths(p: Bf16DepthsProblem) -> Plan | None:
    """Compute a product of groups along k on a GPU. The host waits for no depth: those that it lacks the GPU reads."""
    if p.ks is not None and not any(k % BLOCK_K for k in p.ks):
        rows = sum(p.ks)
        plans = bf16_depths.run(bf16_depths.DepthsProblem(p.a[:rows], p.b[:rows], p.d, p.c, p.ks))
        return plans[0] if len(plans) == 1 else None
    counted = bf16_counted.problem(p.a, p.b, p.d, p.c, p.ks, p.ks_tensor)
    plans = bf16_counted.run(counted)
    # Another call has depths of its own where this one's were made of something else.
    is_callers = counted.sfa is None or counted.sfa is p.layout
    return plans[0] if len(plans) == 1 and is_callers else None
