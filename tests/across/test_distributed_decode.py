"""Prepared calls of the decode form by peer memory, without a GPU: what kernels find at their addresses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import addressed_kernels
import pytest
import torch
from fp4_cases import random_weight
from helpers import inside_of_an_element, same_bits, some
from rank_threads import Ranks
from torch import Tensor

import deep_gemm
from deep_gemm.across import by_peers, decode, experts, rows_to_addresses
from deep_gemm.across.by_peers import Peers
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.core.meeting import Room
from deep_gemm.core.settings import set_compile_mode, set_num_sms, set_pdl
from deep_gemm.distributed import Experts
from deep_gemm.gemm import launch
from deep_gemm.gemm.plan import PLANS
from deep_gemm.moe import api as layers
from deep_gemm.moe import route_rows
from deep_gemm.moe.routing import expert_rows

HIDDEN, TOPK, HERE, MOST = 144, 3, 2, 12
ALL = {"post_rows": 1, "route_rows": 1, "gather_rows": 1, "fp8_gemm_rows": 2, "meet_ranks": 1, "gather_weighted": 1}
FORMS = {"few": {"cast_rows": 1}, "activated": {}}
Given = tuple[Tensor, Tensor, Tensor]
MODES: Sequence[Callable[[], Any]] = (
    *(torch.no_grad, torch.inference_mode, torch.enable_grad),
    lambda: torch.autocast("cpu", torch.bfloat16),
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    counted = addressed_kernels.install(monkeypatch)
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(experts, "why_not", lambda *_: None)
    monkeypatch.setattr(rows_to_addresses.PRODUCT, "reference", launch.run)
    monkeypatch.setattr(PLANS, "plans", {})
    torch.use_deterministic_algorithms(True)  # fills memory that torch.empty gives with NaN, or 255
    yield counted
    torch.use_deterministic_algorithms(False)


def weights_of(rank: int, world: int, intermediate: int) -> tuple[Operand, Operand]:
    """The weights of a rank's experts."""
    g = torch.Generator().manual_seed(0)
    w1, w2 = (
        deep_gemm.per_block_cast_to_fp8(torch.randn(world * HERE, *shape, generator=g)[rank * HERE :][:HERE])
        for shape in ((2 * intermediate, HIDDEN), (HIDDEN, intermediate))
    )
    return w1, w2


class Node:
    """Layers of ranks that know each other's rooms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int, form: str = "few") -> None:
        self.world, self.ranks = world, Ranks(monkeypatch, world)
        self.room = Room(world, MOST, HIDDEN, TOPK)
        self.memories = [addressed_kernels.aligned(self.room.num_bytes) for _ in range(world)]
        monkeypatch.setattr(layers, "MANY_ROWS", 10**6 if form == "few" else 1)

    def layer(self, rank: int, intermediate: int = 80, seconds: float = 60.0, **more: Any) -> Experts:
        return self.connected(rank, weights_of(rank, self.world, intermediate), seconds, **more)

    def connected(self, rank: int, weights: tuple[Operand, Operand], seconds: float = 60.0, **more: Any) -> Experts:
        layer = Experts(self.world * HERE, *weights, max_tokens=MOST, peer_memory=True, **more)
        addresses = tuple(memory.data_ptr() for memory in self.memories)
        layer._peers = Peers(self.memories[rank], addresses, self.room, rank, seconds, HERE)
        return layer


@pytest.fixture
def layer(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Experts:
    """The layer of a node's only rank, which this thread is."""
    return Node(monkeypatch, 1).layer(0)


def given(
    tokens: int, world: int, seed: int, dtype: torch.dtype = torch.bfloat16, ids_dtype: torch.dtype = torch.int64
) -> Given:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, world * HERE, (tokens, TOPK), generator=g).to(ids_dtype)
    return torch.randn(tokens, HIDDEN, generator=g).to(dtype), ids, torch.randn(tokens, TOPK, generator=g)


def by_tensors(layer: Experts, given: Given) -> Tensor:
    """The result of a call that nobody has prepared."""
    return some(layer._decoded(*given, None))


@pytest.mark.few
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.int64), (torch.float32, torch.int32)])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("form", "intermediate"), [("few", 144), ("few", 256), ("activated", 256)])
def test_prepared_calls_have_the_bits_of_calls_by_tensors(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, form: str, intermediate: int, world: int, types: Any
) -> None:
    if form == "few" and world == 3:
        monkeypatch.setattr(route_rows, "PART", 32)
        monkeypatch.setattr(route_rows, "PARTS_ALONE", 0)
    node = Node(monkeypatch, world, form)
    expected = {**ALL, **FORMS[form], **({"count_routes": 1} if route_rows.PART == 32 else {})}

    def of_rank(rank: int) -> None:
        layer = node.layer(rank, intermediate, limit=None if world == 1 else 1.5)
        first = given(5, world, rank, *types)
        layer.decode(*first)
        room = torch.empty(MOST, HIDDEN, dtype=torch.bfloat16)
        layer.decode(*first, out=room[:5])
        assert [len(each.pitches) for each in layer._decodes] == [4, 4]
        for call, tokens in enumerate((1, MOST, 5, 3 * (rank == 1), 0, 9)):
            one = given(tokens, world, 10 * call + rank, *types)
            right = by_tensors(layer, one)
            for out in (None, room.fill_(7)[:tokens]):
                got, count = node.ranks.counted(launched, partial(layer.decode, *one, out=out))
                assert tokens <= 3 or count == expected
                assert same_bits(got if out is None else out, right)
                assert (got is None) == (out is not None)
            assert bool((room[tokens:] == 7).all())
        assert len(layer._decodes) == 2
        layer.connected(TOPK).check()

    node.ranks.run(of_rank)


def with_fp4(experts: int, which: str) -> tuple[Operand, Operand]:
    """Weights of which these are FP4, in bytes or words."""
    shapes = (experts, 256, 256), (experts, 256, 128)
    g = torch.Generator().manual_seed(0)
    w1, w2 = (deep_gemm.per_block_cast_to_fp8(torch.randn(shape, generator=g) / 8) for shape in shapes)
    (v1, s1), (v2, s2) = (random_weight(*shape) for shape in shapes)
    of1, of2 = (v1.view(torch.int8), s1 // 8 + 110), (v2, words_of(s2 // 8 + 110))
    return of1 if "w1" in which else w1, of2 if "w2" in which else w2


@pytest.mark.few
@pytest.mark.parametrize("which", ["w1 and w2", "w1", "w2"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_prepared_calls_with_fp4_weights_have_the_bits_of_one_process(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, form: str, world: int, which: str
) -> None:
    monkeypatch.setitem(globals(), "HIDDEN", 256)
    node, both = Node(monkeypatch, world, form), with_fp4(world * HERE, which)
    expected = {**ALL, **FORMS["few" if "w1" in which else form]}  # of FP4 rows are activated behind the product

    def of_rank(rank: int) -> None:
        mine = slice(rank * HERE, (rank + 1) * HERE)
        w1, w2 = ((values[mine], scales[mine]) for values, scales in both)
        layer = node.connected(rank, (w1, w2))
        for call, tokens in enumerate((5, MOST, 7, 3 * (rank == 1))):
            one = given(tokens, world, 10 * call + rank)
            got, count = node.ranks.counted(launched, partial(layer.decode, *one))
            assert call not in (1, 2) or count == expected
            assert same_bits(got, some(deep_gemm.experts(*one, *both)))
        assert len(layer._decodes) == 1

    node.ranks.run(of_rank)


def test_scales_of_fp4_that_are_copied_are_not_prepared(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call makes its own copy of them. Words that begin between elements are refused, bytes are not."""
    monkeypatch.setitem(globals(), "HIDDEN", 256)
    (w1, (values, words)), node = with_fp4(HERE, "w1 and w2"), Node(monkeypatch, 1)
    apart = torch.cat([w1[1], w1[1][..., :1]], -1)[..., :-1]
    between = torch.cat([w1[1].view(-1)[:2], w1[1].view(-1)])[2:].view(w1[1].shape)

    def of_rank(rank: int) -> None:
        one = given(5, 1, 0)
        layer = node.connected(rank, (w1, (values, words)))
        right = layer.decode(*one)
        assert right is not None and len(layer._decodes) == 1
        for scales in (apart, between):
            layer.w1_scales = scales
            for _ in range(2):
                assert same_bits(layer.decode(*one), right)
        assert len(layer._decodes) == 1
        layer.w1_scales, layer.w2_scales = w1[1], inside_of_an_element(words)
        with pytest.raises(ValueError, match=r"^sf\w+: expected an address that is a multiple of 4 bytes"):
            layer.decode(*one)

    node.ranks.run(of_rank)


def test_scales_of_fp4_that_may_be_no_powers_of_two_are_refused_before_anything_is_sent(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HIDDEN", 160)
    (w1, (values, _)), node = (random_weight(HERE, 256, 160), random_weight(HERE, 160, 128)), Node(monkeypatch, 1)

    def of_rank(rank: int) -> None:
        layer = node.connected(rank, (w1, (values, torch.ones(HERE, 160, 4))))
        with pytest.raises(NotImplementedError, match=r"^sfw2: expected UE8M0 beside FP4 where rows go to other GPUs"):
            layer.decode(*given(3, 1, 0))

    node.ranks.run(of_rank)
    assert not launched


def test_routes_to_nobody_and_to_one_rank(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 3)

    def of_rank(rank: int) -> None:
        layer = node.layer(rank)
        x, ids, p = given(6, 3, rank)
        layer.decode(x, ids, p)
        for expert in (-1, 0, 3 * HERE - 1, 3 * HERE, -7):  # an id that no expert has counts as -1
            one = x, torch.full_like(ids, expert), p
            monkeypatch.setattr(experts, "check_tokens", lambda *_: None)
            assert same_bits(layer.decode(*one), by_tensors(layer, one))

    node.ranks.run(of_rank)


def test_ranks_that_go_different_ways_understand_each_other(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(monkeypatch, 2)

    def of_rank(rank: int) -> None:
        layer = node.layer(rank)
        one = given(7, 2, rank)
        right = some(layer.decode(*one))
        for way in (0, 1):
            assert same_bits(layer.decode(*one) if rank == way else by_tensors(layer, one), right)

    node.ranks.run(of_rank)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[decode.Decode]:
    """Kinds, as calls of them go straight to kernels."""
    seen: list[decode.Decode] = []
    call = decode.Decode.__call__

    def noted(self: decode.Decode, *given: Any) -> Tensor | None:
        seen.append(self)
        return call(self, *given)

    monkeypatch.setattr(decode.Decode, "__call__", noted)
    return seen


def test_each_kind_is_prepared_and_rows_may_lie_apart(
    layer: Experts, seen: list[decode.Decode], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids, p = given(6, 1, 0)
    right = some(layer.decode(x, ids, p))
    wide, room = torch.cat([x, x + 1], dim=1), torch.zeros(8, 2 * HIDDEN, dtype=torch.bfloat16)
    out = room[1:7, :HIDDEN]
    calls: list[tuple[Given, Tensor | None]] = [
        ((x, ids, p), None),
        ((wide[:, :HIDDEN], ids, p), None),
        ((x, ids.int(), p), None),
        ((wide[:, :HIDDEN], ids, p), out),
        ((x[:1].expand(6, -1), ids, p), None),
    ]
    for one, into in calls:
        expected = by_tensors(layer, one)
        layer.decode(*one, out=into)
        for _ in range(2):
            before = len(seen)
            room.zero_()
            got = layer.decode(*one, out=into)
            assert same_bits(got if into is None else into, expected)
            assert len(seen) == before + 1
    assert len(layer._decodes) == len(calls)
    assert int(room.count_nonzero()) <= out.numel()
    for tokens in (1, 4):
        layer.decode(wide[:tokens, :HIDDEN], ids[:tokens], p[:tokens], out=out[:tokens])
        assert same_bits(out[:tokens], right[:tokens])
    assert len(layer._decodes) == len(calls)
    layer.w1_values, layer.w1_scales = layer.w1_values.clone(), 2 * layer.w1_scales  # others of the same kind
    before = len(seen)
    assert same_bits(layer.decode(x, ids, p), by_tensors(layer, (x, ids, p)))
    assert len(seen) == before + 1
    monkeypatch.setattr(experts, "MAX_KINDS", len(calls))
    for _ in range(2):
        layer.decode(x.half(), ids, p)
    assert len(layer._decodes) == len(calls)


def test_what_was_not_prepared_goes_by_tensors(
    layer: Experts, seen: list[decode.Decode], launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids, p = given(6, 1, 0)
    right, out = layer.decode(x, ids, p), torch.zeros(6, HIDDEN, dtype=torch.bfloat16)
    layer.decode(x, ids, p, out=out)
    assert right is not None
    one_row = torch.zeros(1, HIDDEN, dtype=torch.bfloat16).as_strided((1, HIDDEN), (8, 1))
    others: dict[str, tuple[Any, ...]] = {
        "weights in FP16": (x, ids, p.half()),
        "ids apart": (x, torch.stack([ids, ids], dim=2)[:, :, 0], p),
        "columns apart": (torch.stack([x, x], dim=2)[:, :, 0], ids, p),
        "misaligned": (torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), ids, p),
        "one row, whose stride suits no other": (x[:1], ids[:1], p[:1], one_row),
    }
    kinds = len(layer._decodes)
    for name, one in others.items():
        for _ in range(2):
            got = layer.decode(*one[:3], **dict(zip(["out"], one[3:], strict=False)))
            assert not seen and len(layer._decodes) == kinds, name
            assert name == "weights in FP16" or same_bits(one_row if got is None else got, right[: len(one[0])]), name
    with monkeypatch.context() as patched:  # nothing is launched, and products of the CPU look at ids
        patched.setattr(by_peers.Peers, "rows", lambda peers: expert_rows(peers.ids, HERE))
        set_compile_mode(1)
        layer.decode(x, ids, p)
        set_compile_mode(0)
    assert not seen
    layer.decode(x, ids, p)
    assert len(seen) == 1
    w1, w2 = torch.randn(HERE, 160, HIDDEN), torch.randn(HERE, HIDDEN, 80)
    learned = Experts(HERE, w1, w2, max_tokens=MOST, peer_memory=True)
    learned._peers = layer._peers
    assert learned.decode(x, ids, p) is not None
    assert not learned._decodes


def test_each_mode_of_torch_is_prepared_once(layer: Experts, seen: list[decode.Decode]) -> None:
    x, ids, p = given(6, 1, 0)
    right = some(layer.decode(x, ids, p))

    def check(x: Tensor) -> None:
        got = some(layer.decode(x, ids, p))
        assert same_bits(got, right) and not got.requires_grad

    for mode in MODES:
        with mode():
            layer.decode(x, ids, p)
            kinds = len(layer._decodes)
            seen.clear()
            for _ in range(3):
                check(x)
            assert len(seen) == 3
        assert len(layer._decodes) == kinds <= 3
    for _ in range(2):
        check(x.clone().requires_grad_())


def test_plans_follow_the_settings(layer: Experts) -> None:
    one = given(6, 1, 0)
    right = some(layer.decode(*one))
    (made,) = layer._decodes
    usual = made.second.plan(made.rows, layer.weights()[1])
    set_num_sms(1)
    set_pdl(True)
    assert same_bits(layer.decode(*one), right)
    limited = made.second.plan(made.rows, layer.weights()[1])
    assert limited.grid == 1 < usual.grid
    assert limited.launcher is not usual.launcher, "one that may start early"
    set_num_sms(132)
    set_pdl(False)
    assert same_bits(layer.decode(*one), right)


def test_mistakes_are_those_of_calls_by_tensors(layer: Experts, launched: Counter[str]) -> None:
    x, ids, p = given(MOST, 1, 0)
    out = torch.zeros_like(x)
    for into in (None, out):
        layer.decode(x, ids, p, out=into)
    right = out.clone()
    assert len(layer._decodes) == 2
    launched.clear()
    more = torch.cat([x, x]), torch.cat([ids, ids]), torch.cat([p, p])
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("x: expected at most max_tokens = 12 tokens, got 24", more),
        (r"topk_weights: expected shape \(tokens, topk\)", (x, ids, p[:5])),
        (r"topk_ids: expected shape \(tokens, topk\)", (x, ids[:5], p)),
        (r"out: expected shape", (x, ids, p, out[:5])),
        ("out: expected memory that does not overlap x", (x, ids, p, x)),
        ("x: expected a tensor, got a list of 1", ([1], ids, p)),
        ("topk_ids: expected 3 columns, as in the first call, got 2", (x, ids[:, :2], p[:, :2])),
    ]
    for message, call in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            layer.decode(*call[:3], **dict(zip(["out"], call[3:], strict=False)))
    for name, place in (("x", 0), ("topk_ids", 1), ("topk_weights", 2)):
        for at_out in (0, 16, MOST * TOPK * 4 - 16):
            shared = torch.zeros(2 * x.nbytes, dtype=torch.uint8)
            inputs = [x, ids, p]
            size, dtype, shape = inputs[place].nbytes, inputs[place].dtype, inputs[place].shape
            inputs[place] = shared[:size].view(dtype).view(shape)
            into = shared[at_out:][: x.nbytes].view(x.dtype).view(x.shape)
            with pytest.raises(ValueError, match=f"out: expected memory that does not overlap {name}"):
                layer.decode(inputs[0], inputs[1], inputs[2], out=into)
    kept = layer.w1_values
    layer.w1_values = kept.bfloat16()  # as `module.to(torch.bfloat16)` does
    with pytest.raises(ValueError, match=r"w1: expected dtype torch\.float8_e4m3fn, got torch\.bfloat16"):
        layer.decode(x, ids, p)
    layer.w1_values = kept
    assert not launched
    beside = torch.cat([x, x], dim=1)  # two column ranges of one matrix
    for _ in range(2):
        layer.decode(beside[:, :HIDDEN], ids, p, out=beside[:, HIDDEN:])
        assert same_bits(beside[:, HIDDEN:], right)


def test_a_rank_that_does_not_come_is_named(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 2)

    def of_rank(rank: int) -> None:
        layer = node.layer(rank, seconds=0.5)
        one = given(6, 2, rank)
        for _ in range(2):
            layer.decode(*one)
        node.ranks.meeting.wait()
        if rank == 0:
            layer.decode(*one)
            with pytest.raises(RuntimeError, match="rank 1 did not come within"):
                layer.decode(*one)

    node.ranks.run(of_rank)


def test_tensors_that_begin_at_any_byte_are_refused(layer: Experts) -> None:
    x, ids, p = given(6, 1, 0)
    for _ in range(2):
        for wrong in ((x, inside_of_an_element(ids), p), (x, ids, inside_of_an_element(p))):
            with pytest.raises(ValueError, match="expected an address that is a multiple of"):
                layer.decode(*wrong)
        layer.decode(x, ids, p)


def test_more_experts_than_the_kernel_counts_get_their_rows_by_torch(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, room = route_rows.MAX_EXPERTS[-1] + 1, Room(1, MOST, HIDDEN, TOPK)
    memory = addressed_kernels.aligned(room.num_bytes)
    peers = Peers(memory, (memory.data_ptr(),), room, 0, 60.0, experts)
    peers.ids.copy_(torch.randint(-1, experts, peers.ids.shape, generator=torch.Generator().manual_seed(0)))
    for got, right in zip(peers.rows(), expert_rows(peers.ids, experts), strict=True):
        assert torch.equal(got, right)
    assert not launched


def test_tensors_beside_each_other_do_not_overlap(layer: Experts, seen: list[decode.Decode]) -> None:
    """An allocator may give `out` the memory right behind x, or right ahead of it."""
    x, ids, p = given(6, 1, 0)
    right = layer.decode(x, ids, p)
    layer.decode(x, ids, p, out=torch.zeros_like(x))
    pieces = addressed_kernels.aligned(3 * x.nbytes).view(3, x.nbytes).unbind()
    ahead, within, behind = (each.view(x.dtype).view(x.shape) for each in pieces)
    within.copy_(x)
    for out in (ahead, behind):
        seen.clear()
        layer.decode(within, ids, p, out=out)
        assert len(seen) == 1
        assert same_bits(out, some(right))
