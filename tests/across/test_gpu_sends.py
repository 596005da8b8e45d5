"""The kernels of what travels by collectives on a GPU: the numbers and bits that torch's operations give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deep_gemm.across.message import Arrived, gather, pack, row_bytes
from deep_gemm.across.owners import owners_of_routes, owners_of_tokens
from deep_gemm.across.plan_sends import PlanSendsConfig
from deep_gemm.moe.routing import expert_rows, stack_routes, sum_rows, weighted_sum
from lab.sim.plan_sends import check

pytestmark = pytest.mark.gpu


def drawn(tokens: int, topk: int, num_experts: int, dtype: torch.dtype, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, num_experts, (tokens, topk), generator=g).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [(0, 8, 4, 8), (1, 6, 64, 4), (4097, 8, 32, 8), (20000, 6, 6, 64), (300, 9, 2, 1)])
def test_rows_are_planned(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, topk, here, ranks = sizes
    ids = drawn(tokens, topk, here * ranks, dtype, tokens)
    check(None, PlanSendsConfig(dtype.itemsize), ids, here, ranks, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(1, 16, 1), (700, 7168, 8), (64, 4112, 6)])
def test_tokens_are_packed_and_gathered_again(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, hidden, topk = sizes
    here, ranks = 4, 8
    ids = drawn(tokens, topk, here * ranks, torch.int64, hidden)
    x, p = torch.randn(tokens, hidden).to(dtype), torch.rand(tokens, topk)
    rows = expert_rows(owners_of_tokens(owners_of_routes(ids, here, ranks), ranks), ranks)
    sent = int(rows.counts.sum())
    packed = pack(x.cuda(), ids.cuda(), p.cuda(), rows.row_of.cuda(), tokens * min(topk, ranks))[:sent]
    right = pack(x, ids, p, rows.row_of, tokens * topk)[:sent]
    assert torch.equal(packed.cpu(), right)

    on_gpu, on_cpu = Arrived(packed, hidden, topk), Arrived(right, hidden, topk)
    of_cpu = stack_routes(on_cpu.ids, here, 2 * here)
    of_gpu = stack_routes(on_gpu.ids, here, 2 * here)
    for name in ("counts", "ends", "row_of", "token_of", "ids"):
        assert torch.equal(getattr(of_gpu, name).cpu(), getattr(of_cpu, name)), name
    count = int(of_cpu.ends[-1])
    used = [stack_routes(each.ids, here, 2 * here, count) for each in (on_cpu, on_gpu)]
    assert torch.equal(used[1].ids.cpu(), of_cpu.ids[:count])
    assert torch.equal(used[1].token_of.cpu(), of_cpu.token_of[:count])
    right_rows, (values, scales) = gather(on_cpu, used[0]), gather(on_gpu, used[1])
    assert torch.equal(values.cpu().view(torch.uint8), right_rows[0].view(torch.uint8))
    assert torch.equal(scales.cpu(), right_rows[1])

    y = torch.randn(len(of_cpu.ids), hidden).bfloat16()
    for weights in (None, on_cpu.weights):
        summed = sum_rows(y.cuda(), of_gpu.row_of, None if weights is None else on_gpu.weights)
        assert torch.equal(summed.cpu(), weighted_sum(y, of_cpu.row_of, weights).bfloat16())


def test_rows_of_all_ranks_have_no_routes_behind_the_last_token() -> None:
    x, ids, p = torch.randn(3, 256).bfloat16(), drawn(3, 4, 8, torch.int32, 0), torch.rand(3, 4)
    packed = pack(x.cuda(), ids.cuda(), p.cuda(), rows=5)
    assert packed.shape == (5, row_bytes(256, 4) // 4)
    assert torch.equal(packed[:3].cpu(), pack(x, ids, p))
    assert (Arrived(packed, 256, 4).ids[3:] == -1).all()
