"""One GPU plays several ranks of a node, each on a stream of its own: the decode form by peer memory, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import group_of_one, some
from mega_cases import FORMS, random_fp4, take, weights_on_gpu
from torch import Tensor

import deep_gemm
from deep_gemm.across.by_peers import Peers
from deep_gemm.across.message import Arrived, gather, pack, row_bytes
from deep_gemm.across.owners import owners_of_routes, owners_of_tokens
from deep_gemm.across.plan_sends import PlanSendsConfig
from deep_gemm.core import call
from deep_gemm.core.meeting import Room
from deep_gemm.distributed import Experts, decode_bytes
from deep_gemm.moe.routing import expert_rows, stack_routes, sum_rows, weighted_sum
from lab.sim.plan_sends import check

pytestmark = pytest.mark.gpu
NUM, HIDDEN, INTER, TOPK, MAX_TOKENS, SECONDS = 8, 512, 256, 4, 24, 5.0


@pytest.fixture(params=FORMS, autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take(request.param, monkeypatch)


@dataclass
class Rank:
    layer: Experts
    peers: Peers
    stream: torch.cuda.Stream
    x: Tensor
    ids: Tensor
    p: Tensor
    out: Tensor

    def decode(self) -> None:
        assert self.layer.decode(self.x, self.ids, self.p, out=self.out) is None


def ranks_of_one_gpu(
    ranks: int, seconds: float = SECONDS, dtype: torch.dtype = torch.bfloat16, kind: str = "fp8"
) -> list[Rank]:
    g = torch.Generator("cuda").manual_seed(ranks)
    weights: list[Any] = [*weights_on_gpu(NUM, HIDDEN, INTER, g)]
    products = "bf16" if kind == "bf16" else "fp8"
    if kind == "fp8 and fp4":
        weights[1] = random_fp4(NUM, HIDDEN, INTER, g)
    elif kind == "bf16":
        weights = [deep_gemm.cast_back_from_fp8(*each).bfloat16() for each in weights]
    room = Room(ranks, MAX_TOKENS, HIDDEN, TOPK, None if products == "bf16" else 128)
    memories = [torch.zeros(room.num_bytes, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    addresses = tuple(memory.data_ptr() for memory in memories)
    here, found = NUM // ranks, []
    for rank, memory in enumerate(memories):
        mine = slice(rank * here, (rank + 1) * here)
        with mock.patch.multiple(torch.distributed, get_rank=lambda _, rank=rank: rank, get_world_size=lambda _: ranks):
            w1, w2 = (w[mine] if isinstance(w, Tensor) else (w[0][mine], w[1][mine]) for w in weights)
            layer = Experts(NUM, w1, w2, max_tokens=MAX_TOKENS, peer_memory=True, products=products)
        layer._peers = Peers(memory, addresses, room, rank, seconds, here)
        tokens = (MAX_TOKENS, 0, 7, 1)[rank]
        x = torch.randn(tokens, HIDDEN, device="cuda", generator=g).to(dtype)
        ids = torch.randint(-1, NUM, (tokens, TOPK), device="cuda", generator=g)
        p = torch.rand(tokens, TOPK, device="cuda", generator=g)
        out = torch.full_like(x, torch.nan, dtype=torch.bfloat16)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        found.append(Rank(layer, layer._peers, stream, x, ids, p, out))
    warm_up(found)
    return found


def warm_up(ranks: list[Rank]) -> None:
    """Compile, load and record all that a call needs, as if all flags were set. Later the host never waits."""
    for rank in ranks:
        rank.peers.memory[rank.peers.room.flags :].view(torch.int32).fill_(1)
        rank.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(rank.stream):
            rank.decode()
        torch.cuda.synchronize()
    for rank in ranks:
        rank.peers.memory.zero_()
        rank.peers.node.state.zero_()
    torch.cuda.synchronize()


def right(ranks: list[Rank]) -> list[Tensor]:
    """Compute the results of one process with all experts."""

    def whole(i: int) -> Any:
        parts: list[Any] = [rank.layer.weights()[i] for rank in ranks]
        return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(map(torch.cat, zip(*parts, strict=True)))

    w1, w2 = whole(0), whole(1)
    found = [deep_gemm.experts(rank.x, rank.ids, rank.p, w1, w2) for rank in ranks]
    return [each for each in found if each is not None]


def draw(ranks: list[Rank], seed: int) -> None:
    g = torch.Generator("cuda").manual_seed(seed)
    for rank in ranks:
        rank.x.normal_(generator=g)
        rank.ids.random_(-1, NUM, generator=g)
        rank.out.fill_(torch.nan)


def assert_right(ranks: list[Rank]) -> None:
    torch.cuda.synchronize()
    for rank, expected in zip(ranks, right(ranks), strict=True):
        rank.layer.check()
        assert torch.equal(rank.out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("kind", ["fp8", "fp8 and fp4", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_give_what_one_process_gives(count: int, dtype: torch.dtype, kind: str) -> None:
    ranks = ranks_of_one_gpu(count, dtype=dtype, kind=kind)
    for seed in range(4):
        draw(ranks, seed)
        torch.cuda.synchronize()
        for rank in ranks[::-1] if seed % 2 else ranks:
            with torch.cuda.stream(rank.stream):
                rank.decode()
        assert_right(ranks)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_calls_by_a_record_and_without_have_the_same_bits(count: int) -> None:
    """Calls by a record run eagerly and captured, in memory that held NaN."""
    ranks = ranks_of_one_gpu(count)
    graphs = [torch.cuda.CUDAGraph() for _ in ranks]
    for rank, graph in zip(ranks, graphs, strict=True):
        with torch.cuda.graph(graph, stream=rank.stream):
            rank.decode()
    _, size = decode_bytes(count, MAX_TOKENS, TOPK, NUM, HIDDEN, INTER, peer_memory=True)
    for seed in range(3):
        for way in ("without", "by a record", "replayed"):
            draw(ranks, seed)
            for rank in ranks:
                with torch.cuda.stream(rank.stream):
                    torch.empty(size, dtype=torch.uint8, device="cuda").fill_(255)
            torch.cuda.synchronize()
            for rank, graph in zip(ranks, graphs, strict=True):
                with torch.cuda.stream(rank.stream):
                    if way == "without":
                        with mock.patch.multiple(call, RECORDS={}, recorded=lambda *_: (None, None)):
                            rank.decode()
                    else:
                        (graph.replay if way == "replayed" else rank.decode)()
            assert_right(ranks)


def test_ranks_go_on_without_the_host() -> None:
    """Each rank's calls are issued at once, so ranks are out of step by as much as the protocol allows."""
    ranks = ranks_of_one_gpu(4)
    torch.cuda.synchronize()
    for _ in range(8):
        for rank in ranks:
            with torch.cuda.stream(rank.stream):
                rank.decode()
    assert_right(ranks)


def test_graphs_of_all_ranks_are_replayed_with_other_tokens() -> None:
    ranks = ranks_of_one_gpu(2)
    graphs = []
    for rank in ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=rank.stream):
            rank.decode()
        graphs.append(graph)
    for seed in range(3):
        draw(ranks, seed)
        torch.cuda.synchronize()
        for rank, graph in zip(ranks, graphs, strict=True):
            with torch.cuda.stream(rank.stream):
                graph.replay()
        assert_right(ranks)


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = ranks_of_one_gpu(2, seconds=0.2)
    with torch.cuda.stream(ranks[0].stream):
        ranks[0].decode()
    message = "experts across GPUs: rank 1 did not come within 0.2 s, so results since then are undefined"
    with pytest.raises(RuntimeError, match=message):
        ranks[0].layer.check()
    with torch.cuda.stream(ranks[1].stream):  # it finds rank 0's rows, but rank 0 sends no results back
        ranks[1].decode()
    with pytest.raises(RuntimeError, match="rank 0 did not come"):
        ranks[1].layer.check()
    for rank in ranks:
        with pytest.raises(RuntimeError, match="did not come"):
            rank.decode()


def process_that_dies(rank: int, store: str, is_dead: Any, heard: Any) -> None:
    """Call twice as a rank of two. The second one dies between both calls."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    w1, w2 = weights_on_gpu(NUM // 2, HIDDEN, INTER, torch.Generator("cuda").manual_seed(0))
    layer = Experts(NUM, w1, w2, max_tokens=MAX_TOKENS, peer_memory=True, seconds=1.0)
    x = torch.ones(rank + 3, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(0, NUM, NUM // TOPK, device="cuda").expand(rank + 3, TOPK).contiguous()
    p = torch.ones(rank + 3, TOPK, device="cuda")
    layer.decode(x, ids, p)
    layer.check()
    if rank == 1:
        os._exit(0)
    assert is_dead.wait(60)
    begin = time.monotonic()
    layer.decode(x, ids, p)
    try:
        layer.check()
        heard.put(("no error", 0.0))
    except RuntimeError as error:
        heard.put((str(error), time.monotonic() - begin))
    heard.close()
    heard.join_thread()
    os._exit(0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("form", ["apart"], indirect=True)
def test_a_process_that_dies_is_named_in_time(tmp_path: Path, form: None) -> None:
    context = multiprocessing.get_context("spawn")
    is_dead, heard = context.Event(), context.Queue()
    both = [
        context.Process(target=process_that_dies, args=(rank, str(tmp_path / "store"), is_dead, heard))
        for rank in range(2)
    ]
    for each in both:
        each.start()
    try:
        both[1].join(120)
        is_dead.set()
        message, seconds = heard.get(timeout=60)
    finally:
        for each in both:
            each.kill()
    assert "rank 1 did not come within 1.0 s" in message
    assert 1.0 <= seconds < 5.0


def test_symmetric_memory_of_a_group_of_one(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        g = torch.Generator("cuda").manual_seed(0)
        w1, w2 = weights_on_gpu(NUM, HIDDEN, INTER, g)
        layer = Experts(NUM, w1, w2, max_tokens=MAX_TOKENS, peer_memory=True, seconds=SECONDS)
        x = torch.randn(MAX_TOKENS, HIDDEN, device="cuda", generator=g).bfloat16()
        ids = torch.randint(-1, NUM, (MAX_TOKENS, TOPK), device="cuda", generator=g)
        p = torch.rand(MAX_TOKENS, TOPK, device="cuda", generator=g)
        expected = some(deep_gemm.experts(x, ids, p, w1, w2))
        for _ in range(3):
            assert torch.equal(some(layer.decode(x, ids, p)), expected)  # one rank adds, and its sum is rounded once
        layer.check()
        with pytest.raises(ValueError, match="topk_ids: expected 4 columns, as in the first call, got 2"):
            layer.decode(x, ids[:, :2], p[:, :2])


# Kernels of rows that travel by collectives, on a GPU: the numbers and bits of torch's operations.


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
