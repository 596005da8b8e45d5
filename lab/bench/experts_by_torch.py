"""A mixture of experts as chains of torch operations: BF16 with `grouped_mm`, and our products with casts in torch.

The host waits for the GPU in none of these chains, so each chain can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.gemm.api.grouped import m_grouped_fp8_gemm_nt_contiguous

from ..casts import cast_by_torch
from .layers import ACTIVATION, CAST, FIRST, GATHER, ROUTING, SECOND, Steps

MOST_COMPILED = 256
"""The most shapes that one function is compiled for. With torch's default, 8, the ninth shape would run uncompiled."""


class Routes(NamedTuple):
    """Routes sorted by expert."""

    ids: Tensor
    """The expert of each row."""
    token_of: Tensor
    row_of: Tensor
    """`[tokens * topk]`: the row of each route."""
    ends: Tensor


def routes_of(topk_ids: Tensor, num_experts: int) -> Routes:
    """Sort routes by expert; every route has an expert."""
    ids, order = topk_ids.flatten().to(torch.int32).sort(stable=True)
    rows = torch.arange(ids.numel(), device=ids.device)
    row_of = torch.empty_like(rows).scatter_(0, order, rows)
    experts = torch.arange(num_experts, dtype=torch.int32, device=ids.device)
    ends = torch.searchsorted(ids, experts, right=True, out_int32=True)
    return Routes(ids, order // topk_ids.shape[1], row_of, ends)


def activated(h: Tensor) -> Tensor:
    """Compute silu(gate) * up in BF16."""
    gate, up = h.chunk(2, dim=-1)
    return functional.silu(gate) * up


def summed(y: Tensor, row_of: Tensor, weights: Tensor) -> Tensor:
    """Sum up each token's weighted rows in FP32, and round once."""
    rows = y.index_select(0, row_of).view(*weights.shape, -1)
    return (rows.float() * weights[..., None]).sum(dim=1).to(y.dtype)


def summed_by_product(y: Tensor, row_of: Tensor, weights: Tensor) -> Tensor:
    """Add up each token's weighted rows: one small BF16 product for each token, all in one batch."""
    rows = y.index_select(0, row_of).view(*weights.shape, -1)
    return torch.bmm(weights.to(y.dtype)[:, None], rows)[:, 0]


def summed_by_adding(y: Tensor, routes: Routes, weights: Tensor) -> Tensor:
    """Add up each token's weighted rows by atomic additions in FP32."""
    of_rows = torch.empty_like(weights).view(-1).scatter_(0, routes.row_of, weights.flatten())
    total = torch.zeros(weights.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    return total.index_add_(0, routes.token_of, y.float() * of_rows[:, None]).to(y.dtype)


def chains_in_bf16(
    x: Tensor, topk_ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, *, with_compiled: bool = True
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield ways to compute the layer in BF16, by name."""
    num_experts = w1.shape[0]

    def rows(act: Callable[[Tensor], Tensor]) -> tuple[Tensor, Routes]:
        routes = routes_of(topk_ids, num_experts)
        h = functional.grouped_mm(x.index_select(0, routes.token_of), w1.mT, offs=routes.ends)
        return functional.grouped_mm(act(h), w2.mT, offs=routes.ends), routes

    def gathering(act: Callable[[Tensor], Tensor], add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        y, routes = rows(act)
        return add(y, routes.row_of, weights)

    yield "index_add", lambda: summed_by_adding(*rows(activated), weights)
    yield "bmm", lambda: gathering(activated, summed_by_product)
    if with_compiled:
        yield "compiled", lambda: gathering(compiled(activated), compiled(summed))
    else:
        yield "sum", lambda: gathering(activated, summed)


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile a function for each new shape of its arguments."""
    if function not in _COMPILED:
        torch._dynamo.config.recompile_limit = MOST_COMPILED
        _COMPILED[function] = torch.compile(function, dynamic=False)
    return _COMPILED[function]


_COMPILED: dict[Callable[..., Tensor], Callable[..., Tensor]] = {}


def steps_with_casts(x: Tensor, topk_ids: Tensor, weights: Tensor, w1: Operand, w2: Operand, out: Tensor) -> Steps:
    """List the layer's steps with our products, but with all other work in eager torch instead of in our kernels."""
    now: dict[str, Any] = {}
    num_experts = w1[0].shape[0]

    def product(a: Quantized, w: Operand) -> Tensor:
        d = torch.empty(a[0].shape[0], w[0].shape[1], dtype=torch.bfloat16, device=x.device)
        m_grouped_fp8_gemm_nt_contiguous(a, w, d, now["routes"].ids)
        return d

    def cast() -> None:
        values, scales = cast_by_torch(x, 1, SCALE_BLOCK)
        token = now["routes"].token_of
        now["a"] = values.view(torch.uint8).index_select(0, token).view(values.dtype), scales.index_select(0, token)

    def activation() -> None:
        gate, up = now["h"].float().chunk(2, dim=-1)
        now["a"] = cast_by_torch(functional.silu(gate) * up, 1, SCALE_BLOCK)

    return (
        (ROUTING, lambda: now.update(routes=routes_of(topk_ids, num_experts))),
        (CAST, cast),
        (FIRST, lambda: now.update(h=product(now["a"], w1))),
        (ACTIVATION, activation),
        (SECOND, lambda: now.update(y=product(now["a"], w2))),
        (GATHER, lambda: out.copy_(summed(now["y"], now["routes"].row_of, weights))),
    )
