"""Mega MoE on one GPU, which is a group of one: full shapes, CUDA graphs, casts into the buffer."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers import captured
from mega_cases import Model, Tokens, chain, fill, part, result, take, transformed
from mega_cases import call as mega_moe
from torch import Tensor

import deep_gemm
from deep_gemm import SM90SymmBuffer
from deep_gemm.across import mega_by_peers
from deep_gemm.across.by_peers import Peers
from deep_gemm.across.mega_check import mega_sizes

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(params=["apart", "by one kernel"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("model", "clamp"),
    [(Model(4096, 2048, 256, 6), None), (Model(7168, 3072, 384, 6), 2.0)],
    ids=["4096x2048", "7168x3072"],
)
def test_full_shapes_are_the_chain_of_one_expert_after_another(model: Model, clamp: float | None) -> None:
    l1, l2 = model.weights(DEVICE)
    in_turns, same = deep_gemm.transform_weights_for_mega_moe_sm90(l1, l2)
    counts = torch.zeros(model.num_experts, dtype=torch.int32, device=DEVICE)
    received = torch.zeros_like(counts)
    g = torch.Generator().manual_seed(3)
    for count in (8, 100, 1024, 8192):
        tokens, buffer = model.tokens(count, DEVICE, seed=count), model.buffer(count)
        fill(buffer, tokens)
        room = torch.full((count + 1, model.hidden), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        deep_gemm.fp8_mega_moe(room[:count], in_turns, same, buffer, counts, activation_clamp=clamp)
        first = room.clone()
        deep_gemm.fp8_mega_moe(room[:count], in_turns, same, buffer, counts, activation_clamp=clamp)
        assert torch.equal(first.view(torch.int16), room.view(torch.int16)), "another call has other bits"
        assert bool(room[count].isnan().all())
        assert bool(room[:count].isfinite().all())
        drawn = torch.randperm(count, generator=g)[:12].to(DEVICE)
        sample: Tokens = tuple(each[drawn] for each in tokens)  # type: ignore[assignment]
        assert deep_gemm.calc_diff(room[drawn], chain(sample, l1, l2, clamp)) < 1e-4
        received += 2 * torch.bincount(tokens[2][tokens[2] >= 0], minlength=model.num_experts)
        buffer.destroy()
    assert torch.equal(counts, received)
    del l1, l2, in_turns, same
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize("all_to", [None, 5, -1], ids=["many experts", "one expert", "no expert"])
def test_small_shapes_on_a_gpu_are_near_those_of_the_cpu(count: int, all_to: int | None) -> None:
    model = Model(512, 256, 16, 4)
    tokens, (l1, l2) = model.tokens(count, seed=7, all_to=all_to), model.weights()
    of_gpu: Tokens = tuple(each.to(DEVICE) for each in tokens)  # type: ignore[assignment]
    own = [(values.to(DEVICE), scales.to(DEVICE)) for values, scales in (l1, l2)]
    got = result(model.buffer(), of_gpu, own[0], own[1], clamp=0.5)
    assert deep_gemm.calc_diff(got.cpu(), chain(tokens, l1, l2, 0.5)) < 1e-4


def test_a_graph_is_replayed_with_other_tokens_and_routes() -> None:
    model = Model(512, 256, 16, 4)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe_sm90(*model.weights(DEVICE))
    buffer, counts = model.buffer(), torch.zeros(16, dtype=torch.int32, device=DEVICE)
    y = torch.empty(24, 512, dtype=torch.bfloat16, device=DEVICE)
    fill(buffer, model.tokens(24, DEVICE))
    deep_gemm.fp8_mega_moe(y, l1, l2, buffer, counts)
    torch.cuda.synchronize()
    graph, _ = captured(deep_gemm.fp8_mega_moe, y, l1, l2, buffer, counts)
    for seed in range(3):
        tokens = model.tokens(24, DEVICE, seed=10 + seed)
        fill(buffer, tokens)
        counts.zero_()
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(counts, torch.bincount(tokens[2][tokens[2] >= 0], minlength=16).int())
        replayed = y.clone()
        deep_gemm.fp8_mega_moe(y, l1, l2, buffer)
        assert torch.equal(replayed.view(torch.int16), y.view(torch.int16))


def test_tokens_are_cast_into_the_buffer_as_on_the_cpu() -> None:
    model = Model(512, 256, 16, 4)
    buffer, g = model.buffer(), torch.Generator().manual_seed(6)
    x = torch.randn(7, 512, generator=g).bfloat16()
    ids, p = torch.randint(-1, 16, (7, 4), generator=g, dtype=torch.int32), torch.randn(7, 4, generator=g)
    filled = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
    given = x.to(DEVICE), ids.to(DEVICE), p.to(DEVICE)
    deep_gemm.mega_moe_pre_dispatch_sm90(*given, *filled, num_tokens=5, routed_scaling_factor=2.5)
    values, scales = deep_gemm.per_token_cast_to_fp8(x[:5])
    assert torch.equal(buffer.x[:5].cpu().view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(buffer.x_sf[:5].cpu(), scales)
    assert torch.equal(buffer.topk_idx[:5].cpu(), ids[:5].long())
    assert bool((buffer.topk_idx[5:] == -1).all())
    assert torch.equal(buffer.topk_weights[:5].cpu(), p[:5] * 2.5)


@pytest.mark.parametrize("is_fp4", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_gpu_plays_several_ranks_and_gives_the_bits_of_one(ranks: int, is_fp4: bool) -> None:
    """Make three calls in a row; each rank has its own stream."""
    model, by_rank = Model(512, 256, 16, 4, is_fp4), (24, 0, 7, 1)[:ranks]
    weights, here = model.weights(DEVICE), 16 // ranks
    sizes = [mega_sizes(16, 128, 4, 512, 256, True, "swiglu", rank, ranks) for rank in range(ranks)]
    room = mega_by_peers.room_of(sizes[0])
    memories = [torch.zeros(room.num_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(ranks)]
    addresses = tuple(memory.data_ptr() for memory in memories)
    peers = [Peers(memory, addresses, room, rank, 5.0, here) for rank, memory in enumerate(memories)]
    buffers = [SM90SymmBuffer(s, torch.device(DEVICE, 0), None, p) for s, p in zip(sizes, peers, strict=True)]
    own = [transformed(*part(weights, slice(rank * here, (rank + 1) * here))) for rank in range(ranks)]
    ys = [torch.empty(count, 512, dtype=torch.bfloat16, device=DEVICE) for count in by_rank]
    counts = [torch.zeros(here, dtype=torch.int32, device=DEVICE) for _ in range(ranks)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]  # type: ignore[no-untyped-call]

    def call(rank: int) -> None:
        with torch.cuda.stream(streams[rank]):
            mega_moe(ys[rank], *own[rank], buffers[rank], counts[rank], 0.5)

    # Compile, load and allocate all that a call needs, as if all flags were set: later the host never waits.
    for rank in range(ranks):
        peers[rank].memory[room.flags :].view(torch.int32).fill_(1)
        torch.cuda.synchronize()
        call(rank)
        torch.cuda.synchronize()
    for each in peers:
        each.memory.zero_()
        each.node.state.zero_()
    for seed in range(3):
        tokens = model.tokens(sum(by_rank), DEVICE, seed=20 + seed)
        shares: list[Tokens] = list(zip(*(torch.split(each, by_rank) for each in tokens), strict=True))  # type: ignore[arg-type]
        for rank in range(ranks):
            fill(buffers[rank], shares[rank])
            counts[rank].zero_()
            ys[rank].fill_(torch.nan)
        torch.cuda.synchronize()
        for rank in range(ranks):
            call(rank)
        torch.cuda.synchronize()
        for each in peers:
            each.check()
        with pytest.MonkeyPatch.context() as other:
            take("apart", other)  # one kernel must give the bits of two
            right = result(model.buffer(), tokens, *weights, clamp=0.5)
        assert torch.equal(torch.cat(ys).view(torch.int16), right.view(torch.int16))
        came = torch.bincount(tokens[2][tokens[2] >= 0], minlength=16).int()
        assert torch.equal(torch.cat(counts), came)


def test_other_routes_leave_nothing_behind() -> None:
    """Slots keep rows of earlier calls; a slot whose route now has no expert must add nothing."""
    model = Model(512, 256, 16, 4)
    weights, buffer = model.weights(DEVICE), model.buffer()
    result(buffer, model.tokens(128, DEVICE, seed=1), *weights)
    tokens = model.tokens(5, DEVICE, seed=2)
    tokens[2][2] = -1
    got: Tensor = result(buffer, tokens, *weights)
    fresh = result(model.buffer(), tokens, *weights)
    assert torch.equal(got.view(torch.int16), fresh.view(torch.int16))
    assert not got[2].any()
