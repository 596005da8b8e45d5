"""Calls of mega MoE by peer memory, without a GPU: what kernels find at their addresses."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import addressed_kernels
import pytest
import torch
from fp4_cases import FORMS
from helpers import inside_of_an_element, same_bits, some
from mega_cases import Model, Tokens, call, fill, part, result, transformed
from rank_threads import Ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import deep_gemm
from deep_gemm import SM90SymmBuffer
from deep_gemm.across import mega_by_peers
from deep_gemm.across import mega_check as mega_moe
from deep_gemm.across.by_peers import Peers
from deep_gemm.across.mega_check import mega_sizes
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.settings import set_compile_mode, set_num_sms, set_pdl
from deep_gemm.moe import prepared, route_rows
from deep_gemm.moe.prepared import MAX_KINDS

MODEL, MOST = Model(hidden=256, inter=128, num_experts=6, topk=3), 128
ALL = {"post_rows": 1, "route_rows": 1, "gather_rows": 1, "fp8_gemm_rows": 2, "meet_ranks": 1, "gather_weighted": 1}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    counted = addressed_kernels.install(monkeypatch)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    torch.use_deterministic_algorithms(True)  # fills memory that torch.empty gives with NaN, or 255
    yield counted
    torch.use_deterministic_algorithms(False)


class Node:
    """Buffers of ranks that know each other's rooms, and weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int, *, model: Model = MODEL) -> None:
        self.world, self.here, self.ranks = world, MODEL.num_experts // world, Ranks(monkeypatch, world)
        self.sizes = [
            mega_sizes(MODEL.num_experts, MOST, MODEL.topk, MODEL.hidden, MODEL.inter, True, "swiglu", rank, world)
            for rank in range(world)
        ]
        self.room = mega_by_peers.room_of(self.sizes[0])
        self.memories = [addressed_kernels.aligned(self.room.num_bytes) for _ in range(world)]
        self.model, self.weights = model, model.weights()

    def buffer(self, rank: int, seconds: float = 60.0) -> SM90SymmBuffer:
        addresses = tuple(memory.data_ptr() for memory in self.memories)
        peers = Peers(self.memories[rank], addresses, self.room, rank, seconds, self.here)
        return SM90SymmBuffer(self.sizes[rank], torch.device("cpu"), None, peers)

    def own(self, rank: int) -> tuple[Operand, Operand]:
        mine = slice(rank * self.here, (rank + 1) * self.here)
        return transformed(*part(self.weights, mine))

    def right(self, tokens: Tokens, clamp: float | None = None) -> Tensor:
        """The bits of one process by collectives."""
        return result(self.model.buffer(max(len(tokens[0]), 1)), tokens, *self.weights, clamp=clamp)


def checked_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls, as they are checked."""
    seen: list[Any] = []
    check = mega_moe.mega_problem

    def noted(*given: Any, is_fp4: bool) -> mega_moe.MegaProblem:
        seen.append(given)
        return check(*given, is_fp4=is_fp4)

    monkeypatch.setattr(mega_by_peers, "mega_problem", noted)
    return seen


@pytest.mark.few
@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("form", ["all at once", "routes by parts"])
def test_calls_have_the_bits_of_one_process(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, form: str, world: int, clamp: float | None
) -> None:
    if form == "routes by parts":
        monkeypatch.setattr(route_rows, "PART", 64)
        monkeypatch.setattr(route_rows, "PARTS_ALONE", 0)
    node, checked = Node(monkeypatch, world), checked_calls(monkeypatch)
    expected = ALL | ({"count_routes": 1} if form == "routes by parts" else {})
    calls = []
    for by_three in ((5, 3, 9), (1, MOST, 0), (0, 1, 3), (MOST, 7, 2)):
        by_rank = by_three[:world]
        tokens = MODEL.tokens(sum(by_rank), seed=sum(by_rank))
        calls.append((by_rank, tokens, node.right(tokens, clamp)))

    def of_rank(rank: int) -> None:
        buffer, own = node.buffer(rank), node.own(rank)
        room = torch.empty(MOST, MODEL.hidden, dtype=torch.bfloat16)
        received = torch.zeros(node.here, dtype=torch.int32)
        for by_rank, tokens, right in calls:
            fill(buffer, tuple(torch.split(each, by_rank)[rank] for each in tokens))  # type: ignore[arg-type]
            came = torch.bincount(tokens[2][tokens[2] >= 0], minlength=MODEL.num_experts)
            for counts in (None, received.zero_()):
                given = room.fill_(7)[: by_rank[rank]], *own, buffer, counts
                _, count = node.ranks.counted(launched, partial(deep_gemm.fp8_mega_moe, *given, activation_clamp=clamp))
                assert min(by_rank) == 0 or count == expected
                assert same_bits(room[: by_rank[rank]], torch.split(right, [*by_rank])[rank])
                assert bool((room[by_rank[rank] :] == 7).all())
            assert torch.equal(received, came[rank * node.here :][: node.here].int())

    node.ranks.run(of_rank)
    assert len(checked) == 2 * world, "once without and once with counts"


@pytest.mark.parametrize("world", [1, 3])
def test_calls_with_fp4_weights_have_the_bits_of_one_process(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    node = Node(monkeypatch, world, model=replace(MODEL, is_fp4=True))
    checked = checked_calls(monkeypatch)
    by_rank = [5, 3, 9][:world]
    tokens = MODEL.tokens(sum(by_rank))
    right = torch.split(node.right(tokens, 0.5), by_rank)
    forms = [(name, form, 1) for name, form in FORMS.items() if "FP32" not in name]
    # Bytes that are no whole words, and an l1 of any scales, are checked and copied by each call.
    forms += [("apart", lambda scales: torch.cat([scales, scales[..., :1]], -1)[..., :-1], 3)]

    def of_rank(rank: int) -> None:
        buffer, (l1, l2) = node.buffer(rank), part(node.weights, slice(rank * node.here, (rank + 1) * node.here))
        fill(buffer, tuple(torch.split(each, by_rank)[rank] for each in tokens))  # type: ignore[arg-type]
        for name, form, times in forms:
            checked.clear()
            for _ in range(3):
                y = torch.full((by_rank[rank], MODEL.hidden), 7, dtype=torch.bfloat16)
                given = y, (l1[0], form(l1[1])), (l2[0], form(l2[1])), buffer, None, 0.5
                _, count = node.ranks.counted(launched, partial(call, *given))
                assert count == {**ALL, "cast_rows": 1}
                assert same_bits(y, right[rank]), name
            assert len(checked) == times * world, name
            node.ranks.meeting.wait()
        y.fill_(7)
        call(y, (l1[0], FORMS["powers of two in FP32"](l1[1])), l2, buffer, None, 0.5)
        assert same_bits(y, right[rank])

    node.ranks.run(of_rank)
    of_any_value = torch.ones(node.here, MODEL.hidden, MODEL.inter // 32)
    l1, (values, _) = node.own(0)
    y, told = torch.empty(1, MODEL.hidden, dtype=torch.bfloat16), "^sfl2_weights: expected UE8M0 beside FP4 where rows"
    with pytest.raises(NotImplementedError, match=f"{told} go to other GPUs"):
        call(y, l1, (values, of_any_value), node.buffer(0), None, None)


def test_ranks_go_the_same_way_whether_calls_are_checked_or_not(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose torch compares tensors otherwise checks each call."""
    node = Node(monkeypatch, 2)
    tokens = MODEL.tokens(8)
    right = torch.split(node.right(tokens), 4)
    monkeypatch.setattr(mega_by_peers, "torch_compares", lambda: node.ranks.own.rank == 0)

    def of_rank(rank: int) -> None:
        buffer, own = node.buffer(rank), node.own(rank)
        fill(buffer, tuple(torch.split(each, 4)[rank] for each in tokens))  # type: ignore[arg-type]
        for _ in range(3):
            y = torch.empty(4, MODEL.hidden, dtype=torch.bfloat16)
            deep_gemm.fp8_mega_moe(y, *own, buffer)
            assert same_bits(y, right[rank])
        assert len(buffer.calls._alike) == 1 - rank  # type: ignore[union-attr]
        assert len(buffer.calls._launches) == 1  # type: ignore[union-attr]

    node.ranks.run(of_rank)


class Alone:
    """One rank, its buffer filled, and what is right."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int = 6) -> None:
        self.node = Node(monkeypatch, 1)
        self.buffer, (self.l1, self.l2) = self.node.buffer(0), self.node.own(0)
        self.tokens = MODEL.tokens(tokens)
        fill(self.buffer, self.tokens)
        self.right = self.node.right(self.tokens)
        self.checked = checked_calls(monkeypatch)

    def call(self, y: Tensor, *more: Any, **said: Any) -> None:
        deep_gemm.fp8_mega_moe(y, self.l1, self.l2, self.buffer, *more, **said)

    def y(self) -> Tensor:
        return torch.zeros_like(self.right)


def test_each_kind_is_checked_once(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch)
    limited, loose = (alone.node.right(alone.tokens, clamp) for clamp in (0.5, 1000.0))
    assert not same_bits(limited, alone.right)
    assert same_bits(loose, alone.right)
    wide = torch.zeros(8, 2 * MODEL.hidden, dtype=torch.bfloat16)
    counts = torch.zeros(6, dtype=torch.int32)
    kinds: list[tuple[Tensor, tuple[Any, ...], dict[str, Any], Tensor]] = [
        (alone.y(), (), {}, alone.right),
        (wide[1:7, MODEL.hidden :], (), {}, alone.right),
        (alone.y(), (counts,), {}, alone.right),
        (alone.y(), (), {"activation_clamp": 0.5}, limited),
        (alone.y(), (counts,), {"activation_clamp": 0.5, "recipe": (128, 128, 128)}, limited),
    ]
    for number, (y, more, said, right) in enumerate(kinds):
        for _ in range(3):
            wide.zero_()
            y.zero_()
            alone.call(y, *more, **said)
            assert same_bits(y.contiguous(), right)
        assert int(wide.count_nonzero()) <= right.numel()
        assert len(alone.checked) == number + 1
    for y, more, said, right in reversed(kinds):
        alone.call(y[:4], *more, **said)
        assert same_bits(y[:4].contiguous(), right[:4])
    assert len(alone.checked) == len(kinds)
    alone.l1, alone.l2 = (alone.l1[0].clone(), 2 * alone.l1[1]), (alone.l2[0].clone(), 2 * alone.l2[1])
    alone.node.weights = tuple((values, 2 * scales) for values, scales in alone.node.weights)  # type: ignore[assignment]
    y = alone.y()
    alone.call(y)
    assert same_bits(y, alone.node.right(alone.tokens))
    assert len(alone.checked) == len(kinds), "other weights of the same kind"
    for clamp in range(1, 12):
        alone.call(y, activation_clamp=clamp)
    calls = some(alone.buffer.calls)
    assert len(calls._alike) == len(calls._launches) == MAX_KINDS


def shifted(weight: Operand) -> Operand:
    """The same with values that begin 8 bytes behind a multiple of 16."""
    values, scales = weight
    place = addressed_kernels.aligned(values.nbytes + 8)[8:].view(values.dtype).view(values.shape)
    return place.copy_(values), scales


def test_what_may_be_wrong_is_checked_each_time(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch)
    y, counts = alone.y(), torch.zeros(6, dtype=torch.int32)
    for more in ((), (counts,)):
        alone.call(y, *more)
    l1, l2 = alone.l1, alone.l2
    columns_of_x = alone.buffer.x.view(torch.bfloat16)[:6].view(-1)[: 6 * MODEL.hidden // 2].view(3, MODEL.hidden)
    of_weight = l1[0].view(torch.bfloat16).view(-1, MODEL.hidden)
    launched.clear()
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("y: expected at most 128 tokens", (torch.zeros(129, MODEL.hidden, dtype=torch.bfloat16), l1, l2), {}),
        (r"y: expected shape \(tokens, hidden\)", (y[:, :128], l1, l2), {}),
        ("y: expected dtype torch.bfloat16", (y.half(), l1, l2), {}),
        ("y: expected a tensor, got None", (None, l1, l2), {}),
        ("y: expected memory that does not overlap buffer.x", (columns_of_x, l1, l2), {}),
        ("y: expected memory that does not overlap l1", (of_weight[:5], l1, l2), {}),
        ("y: expected memory that does not overlap l1", (of_weight[-1:], l1, l2), {}),
        ("l1_weights: expected a pair", (y, l1[0], l2), {}),
        ("l1_weights: expected a pair", (y, None, l2), {}),
        ("l2_weights: expected a pair", (y, l1, (*l2, l2)), {}),
        ("activation_clamp: expected a finite FP32 number", (y, l1, l2), {"activation_clamp": True}),
        ("activation_clamp: expected a number above 0", (y, l1, l2), {"activation_clamp": 0}),
        (r"recipe: expected \(128, 128, 128\)", (y, l1, l2), {"recipe": (1, 128, 128)}),
        ("activation: expected 'swiglu'", (y, l1, l2), {"activation": "gelu"}),
    ]
    for message, (out, of_l1, of_l2), said in wrong:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
            deep_gemm.fp8_mega_moe(out, of_l1, of_l2, alone.buffer, **said)
    for wrong_counts, message in (
        (counts[:5], "cumulative_local_expert_recv_stats: expected shape"),
        (torch.cat([counts, counts]), "cumulative_local_expert_recv_stats: expected shape"),
        (counts.long(), "cumulative_local_expert_recv_stats: expected dtype"),
        (y.view(torch.int32)[0, :6], "y: expected memory that does not overlap cumulative_local_expert_recv_stats"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            alone.call(y, wrong_counts)
    shared = addressed_kernels.aligned(y.nbytes)
    of_shared = shared.view(torch.bfloat16).view(y.shape)
    for begin in (0, y.nbytes - y[0].nbytes, y.nbytes - 32):
        with pytest.raises(ValueError, match="y: expected memory that does not overlap cumulative"):
            alone.call(of_shared, shared[begin:][:24].view(torch.int32))
    misaligned = shared[8:][: 5 * y[0].nbytes].view(torch.bfloat16).view(5, -1)
    with pytest.raises(ValueError, match="y: expected an address that is a multiple of 16 bytes"):
        alone.call(misaligned)
    for name, weights in (("l1_weights", (shifted(l1), l2)), ("l2_weights", (l1, shifted(l2)))):
        with pytest.raises(ValueError, match=f"{name}: expected an address that is a multiple of 16 bytes"):
            deep_gemm.fp8_mega_moe(y, *weights, alone.buffer)
    with pytest.raises(ValueError, match="cumulative_local_expert_recv_stats: expected an address"):
        alone.call(y, inside_of_an_element(counts))
    with pytest.raises(ValueError, match="sfl1_weights: expected an address that is a multiple of 4 bytes"):
        deep_gemm.fp8_mega_moe(y, (l1[0], inside_of_an_element(l1[1])), l2, alone.buffer)
    assert not launched
    alone.checked.clear()
    alone.call(y)
    assert not alone.checked
    assert same_bits(y, alone.right)
    with monkeypatch.context() as watched:
        watched.setattr(prepared, "num_modes", lambda: 1)
        alone.call(y.zero_())
    assert same_bits(y, alone.right)
    assert len(alone.checked) == 1
    with FakeTensorMode():
        of_no_memory = torch.empty(6, MODEL.hidden, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"y: expected a tensor that has memory, .* got a FakeTensor"):
        alone.call(of_no_memory)
    faked = FakeTensorMode().from_tensor(l1[0]), l1[1]
    with pytest.raises(NotImplementedError, match=r"l1_weights: expected a tensor that has memory, .* a FakeTensor"):
        deep_gemm.fp8_mega_moe(y, faked, l2, alone.buffer)
    calls = some(alone.buffer.calls)
    assert len(calls._alike) == 2, "one without counts, and one with counts"


def test_a_single_row_whose_stride_suits_no_other_is_checked(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(monkeypatch)
    one = torch.zeros(1, MODEL.hidden, dtype=torch.bfloat16).as_strided((1, MODEL.hidden), (8, 1))
    for _ in range(2):
        one.zero_()
        alone.call(one)
        assert same_bits(one.view(-1), alone.right[0])
    assert len(alone.checked) == 2
    with pytest.raises(ValueError, match="y: "):
        alone.call(torch.zeros(4000, dtype=torch.bfloat16).as_strided((6, MODEL.hidden), (8, 1)))


def test_each_mode_of_torch_is_checked_once_and_gradients_are_refused(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(monkeypatch)
    y = alone.y()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            alone.call(y.zero_())
            alone.checked.clear()
            for _ in range(2):
                alone.call(y)
            assert not alone.checked
            assert same_bits(y, alone.right)
    alone.l1[1].requires_grad_()  # a leaf, as a module's Parameters are
    alone.call(y)
    alone.checked.clear()
    alone.call(y)
    assert not alone.checked
    alone.l1 = alone.l1[0], alone.l1[1] * 1
    for _ in range(2):
        with pytest.raises(ValueError, match="sfl1_weights: expected a tensor without a gradient"):
            alone.call(y)
        with torch.no_grad():
            alone.call(y)
    assert same_bits(y, alone.right)


def test_calls_follow_the_settings(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alone, y = Alone(monkeypatch), torch.zeros(6, MODEL.hidden, dtype=torch.bfloat16)
    alone.call(y)
    calls = some(alone.buffer.calls)
    (launches,) = calls._launches.values()
    assert isinstance(launches, mega_by_peers.Launches)
    products, rows = (launches.first, launches.second), calls.sizes.rows
    usual = [product._plans[rows] for product in products]
    set_num_sms(1)
    set_pdl(True)
    alone.call(y.zero_())
    assert same_bits(y, alone.right)
    for product, plan in zip(products, usual, strict=True):
        assert product._plans[rows].grid == 1 < plan.grid
        assert product._plans[rows].launcher is not plan.launcher, "one that may start early"
    set_compile_mode(1)
    launched.clear()
    counts = torch.zeros(6, dtype=torch.int32)
    alone.call(y.zero_(), counts)
    assert not launched and not y.any() and not counts.any()
    set_compile_mode(0)
    set_num_sms(132)
    set_pdl(False)
    alone.checked.clear()
    alone.call(y.zero_())
    assert same_bits(y, alone.right)
    assert not alone.checked


def test_a_rank_that_does_not_come_is_named(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 2)

    def of_rank(rank: int) -> None:
        buffer, own = node.buffer(rank, seconds=0.5), node.own(rank)
        y = torch.zeros(3, MODEL.hidden, dtype=torch.bfloat16)
        for _ in range(2):
            deep_gemm.fp8_mega_moe(y, *own, buffer)
        node.ranks.meeting.wait()
        if rank == 0:
            deep_gemm.fp8_mega_moe(y, *own, buffer)
            with pytest.raises(RuntimeError, match="rank 1 did not come within"):
                deep_gemm.fp8_mega_moe(y, *own, buffer)

    node.ranks.run(of_rank)


def test_a_buffer_that_was_destroyed_lets_go_of_its_memory(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, y = Alone(monkeypatch), torch.zeros(6, MODEL.hidden, dtype=torch.bfloat16)
    alone.call(y)
    calls = some(alone.buffer.calls)
    held = [weakref.ref(each) for each in (calls, calls.peers, alone.buffer.l2_acts)]
    del calls
    alone.checked.clear()
    gc.collect()
    gc.disable()  # memory of a GPU is given back at once
    try:
        alone.buffer.destroy()
        assert [each() for each in held] == [None, None, None]
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="buffer: expected one that is in use"):
        alone.call(y)
