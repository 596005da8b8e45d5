"""Casts of groups of rows along their rows on a GPU: the references, the same bits each time, graphs, no waits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deep_gemm import k_grouped_fp8_gemm_nt_contiguous
from deep_gemm.casts.depths import GroupedRows, SiluCasts, cast_along_groups, cast_silu_gradient
from deep_gemm.casts.rules import Quantized
from deep_gemm.moe.routing import expert_rows
from lab.casts import MOST_OTHERS, assert_near, assert_same_bits
from lab.sim.cast_depths import OF_BF16, of_groups

pytestmark = pytest.mark.gpu

SIZES = [(1, 1, 16, 16), (40, 5, 144, 80), (700, 128, 256, 208), (3000, 7, 2048, 768), (20, 1000, 64, 64)]
"""Tokens, experts, hidden, intermediate."""


def problem(
    tokens: int, experts: int, hidden: int, i: int, seed: int = 0
) -> tuple[GroupedRows, Tensor, Tensor, Tensor]:
    """Groups, tokens, gate and up, and what flows back, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = expert_rows(torch.randint(-1, experts, (tokens, 4), generator=generator), experts)
    x, h, ds = (
        torch.randn(m, n, generator=generator) for m, n in ((tokens, hidden), (4 * tokens, 2 * i), (4 * tokens, i))
    )
    return GroupedRows(rows.counts, rows.ends, rows.token_of), x.bfloat16(), h.bfloat16(), ds.bfloat16()


def weights_of(groups: GroupedRows) -> Tensor:
    return torch.rand(len(groups.token_of), generator=torch.Generator().manual_seed(3))


def on_gpu(groups: GroupedRows) -> GroupedRows:
    return GroupedRows(*(each.cuda() for each in groups))


def used(columns: Quantized, groups: GroupedRows) -> Quantized:
    values, scales = of_groups(columns, groups)
    return values.cpu(), scales.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_the_references(size: tuple[int, int, int, int], weighted: bool, dtype: torch.dtype) -> None:
    groups, x, _, _ = problem(*size)
    p, x = weights_of(groups) if weighted else None, x.to(dtype)
    for lies in (x.cuda(), torch.cat([x, x], 1).cuda()[:, : x.shape[1]], torch.cat([x[:, :1], x], 1).cuda()[:, 1:]):
        found = cast_along_groups(lies, on_gpu(groups), None if p is None else p.cuda())
        assert_same_bits(used(found, groups), cast_along_groups(x, groups, p))


def all_of(found: SiluCasts, groups: GroupedRows) -> list[Tensor]:
    end = int(groups.ends[-1])
    assert found.rows is not None and found.columns is not None
    assert found.activated is not None and found.of_weights is not None
    columns = (*used(found.columns, groups), *used(found.activated, groups))
    return [*(each[:end].cpu() for each in found.rows), *columns, found.of_weights[:end].cpu()]


def bytes_of(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_silu_is_the_references(size: tuple[int, int, int, int], limit: float | None) -> None:
    groups, _, h, ds = problem(*size)
    p, there = weights_of(groups), on_gpu(groups)
    right = all_of(cast_silu_gradient(h, ds, groups, p, limit), groups)
    found = all_of(cast_silu_gradient(h.cuda(), ds.cuda(), there, p.cuda(), limit), groups)
    for at in (0, 2, 4):
        if right[at].numel():
            assert assert_near((found[at], found[at + 1]), (right[at], right[at + 1]), OF_BF16) < MOST_OTHERS
    torch.testing.assert_close(found[6], right[6], rtol=1e-4, atol=1e-3)
    again = all_of(cast_silu_gradient(h.cuda(), ds.cuda(), there, p.cuda(), limit), groups)
    assert all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in zip(found, again, strict=True))


def test_operands_with_room_behind_them_give_the_products_of_each_group_and_nobody_waits() -> None:
    """In a graph, which is replayed with other groups."""
    groups, x, h, ds = problem(700, 16, 256, 208)
    others, *_ = problem(700, 16, 256, 208, seed=1)
    now, x, h, ds, p = on_gpu(groups), x.cuda(), h.cuda(), ds.cuda(), weights_of(groups).cuda()
    d = torch.empty(16, 416, 256, dtype=torch.float32, device="cuda")

    def product() -> None:
        of_gates = cast_silu_gradient(h, ds, now, p).columns
        assert of_gates is not None
        k_grouped_fp8_gemm_nt_contiguous(of_gates, cast_along_groups(x, now), d, None, now.depths)

    product()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        product()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product()
    for these in (groups, others):
        for to, made in zip(now, these, strict=True):
            to.copy_(made)
        graph.replay()
        of_gates = cast_silu_gradient(h.cpu(), ds.cpu(), these, p.cpu()).columns
        assert of_gates is not None
        right = torch.empty(d.shape)
        k_grouped_fp8_gemm_nt_contiguous(of_gates, cast_along_groups(x.cpu(), these), right, None, these.depths)
        assert float((d.cpu() - right).norm() / right.norm()) < 2e-2
