"""The decode form by peer memory, without a GPU: the values at the addresses of launches, by records and without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import addressed_kernels
import pytest
import torch
from addressed_kernels import Seen, on_cpu
from fp4_cases import random_weight
from helpers import inside_of_an_element, same_bits, some
from mega_cases import FORMS, take
from rank_threads import Ranks
from torch import Tensor

import deep_gemm
from deep_gemm.across import by_peers, experts
from deep_gemm.across.by_peers import Peers
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.core.meeting import Room
from deep_gemm.distributed import Experts, decode_bytes
from deep_gemm.moe import route_rows
from deep_gemm.moe.routing import expert_rows, stack_routes

HIDDEN, TOPK, HERE, MOST = 144, 3, 2, 12
ALL = ["post_rows", "route_rows", "gather_rows", "fp8_gemm_rows", "fp8_gemm_rows", "meet_ranks", "gather_weighted"]
TWICE = [*ALL[:2], "fp8_gemm_rows", *ALL[-2:]]
LAUNCHES = {"apart": [*ALL[:4], "cast_rows", *ALL[4:]], "by one kernel": TWICE}
Given = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(experts, "why_not", lambda *_: None)
    torch.use_deterministic_algorithms(True)  # fills memory that torch.empty gives with NaN, or 255
    of_bf16 = by_peers.MADE_BY_BF16, by_peers.INTO_BY_BF16
    yield addressed_kernels.install(monkeypatch, by_peers.MADE, by_peers.INTO, *of_bf16)
    torch.use_deterministic_algorithms(False)


@on_cpu
def weights_of(experts: int, intermediate: int) -> tuple[Operand, Operand]:
    """Draw the weights of all experts."""
    g = torch.Generator().manual_seed(0)
    w1, w2 = (
        deep_gemm.per_block_cast_to_fp8(torch.randn(experts, *shape, generator=g))
        for shape in ((2 * intermediate, HIDDEN), (HIDDEN, intermediate))
    )
    return w1, w2


def part(weights: Sequence[Operand | Tensor], rank: int) -> list[Any]:
    """Return the weights of a rank's experts."""
    mine = slice(rank * HERE, (rank + 1) * HERE)
    return [w[mine] if isinstance(w, Tensor) else (w[0][mine], w[1][mine]) for w in weights]


class Node:
    """Layers of ranks that know each other's rooms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world: int, weights: tuple[Any, Any] | None = None) -> None:
        self.world, self.weights = world, weights or weights_of(world * HERE, 80)
        self.is_bf16 = isinstance(self.weights[0], Tensor)
        self.ranks = Ranks(monkeypatch, world)
        self.room = Room(world, MOST, HIDDEN, TOPK, None if self.is_bf16 else 128)
        self.memories = [addressed_kernels.aligned(self.room.num_bytes) for _ in range(world)]

    def layer(self, rank: int, seconds: float = 60.0, limit: float | None = None) -> Experts:
        w1, w2 = part(self.weights, rank)
        products = "bf16" if self.is_bf16 else "fp8"
        said: dict[str, Any] = {"max_tokens": MOST, "peer_memory": True, "limit": limit, "products": products}
        layer = Experts(self.world * HERE, w1, w2, **said)
        addresses = tuple(memory.data_ptr() for memory in self.memories)
        layer._peers = Peers(self.memories[rank], addresses, self.room, rank, seconds, HERE)
        return layer

    @on_cpu
    def right(self, one: Given, **said: Any) -> Tensor:
        """Compute the result of one process with all experts."""
        weights = [w.bfloat16() if isinstance(w, Tensor) else w for w in self.weights]
        return some(deep_gemm.experts(*one, *weights, **said))


def given(
    tokens: int, world: int, seed: int, dtype: torch.dtype = torch.bfloat16, ids_dtype: torch.dtype = torch.int64
) -> Given:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, world * HERE, (tokens, TOPK), generator=g).to(ids_dtype)
    return torch.randn(tokens, HIDDEN, generator=g).to(dtype), ids, torch.randn(tokens, TOPK, generator=g)


def counts(*names: str) -> dict[str, int]:
    return {name: names.count(name) for name in names}


@pytest.mark.few
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.int64), (torch.float32, torch.int32)])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("form", "intermediate"), [*product(FORMS, (144, 256))])
def test_calls_have_the_bits_of_one_process_by_few_records(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, form: str, intermediate: int, world: int, types: Any
) -> None:
    names = LAUNCHES["apart" if intermediate == 144 else form]
    if form == "apart" and world == 3:
        monkeypatch.setattr(route_rows, "PART", 32)
        monkeypatch.setattr(route_rows, "PARTS_ALONE", 0)
        names = [*names, "count_routes"]
    take(form, monkeypatch)
    node, limit = Node(monkeypatch, world, weights_of(world * HERE, intermediate)), None if world == 1 else 1.5

    def of_rank(rank: int) -> None:
        layer, room = node.layer(rank, limit=limit), torch.empty(MOST, HIDDEN, dtype=torch.bfloat16)
        for number, tokens in enumerate((5, 1, MOST, 3 * (rank == 1), 0, 9)):
            one = given(tokens, world, 10 * number + rank, *types)
            right = node.right(one, limit=limit)
            for out in (None, room.fill_(7)[:tokens]):
                got, count = node.ranks.counted(seen.gpu.launches, partial(layer.decode, *one, out=out))
                assert tokens <= 3 or count == counts(*names)
                assert same_bits(got if out is None else out, right)
                assert (got is None) == (out is not None)
            assert bool((room[tokens:] == 7).all())
        layer.connected(TOPK).check()

    node.ranks.run(of_rank)
    assert None not in seen.made
    assert len(seen.made) == world * 2 * 2, "some tokens and none, with `out` and without"
    _, said = decode_bytes(world, MOST, TOPK, world * HERE, HIDDEN, intermediate, peer_memory=True)
    parts = 12  # number of tensors in the buffer; each begins at a multiple of 256 bytes
    assert node.room.num_bytes + max(seen.scratch) <= said + 4 * MOST * TOPK + 256 * parts


@on_cpu
def with_fp4(experts: int, which: str) -> tuple[Operand, Operand]:
    """Draw weights of experts; `which` names the FP4 weights. FP4's w1 has bytes for scales, and w2 has words."""
    shapes = (experts, 512, 256), (experts, 256, 256)
    g = torch.Generator().manual_seed(0)
    w1, w2 = (deep_gemm.per_block_cast_to_fp8(torch.randn(shape, generator=g) / 8) for shape in shapes)
    (v1, s1), (v2, s2) = (random_weight(*shape) for shape in shapes)
    of1, of2 = (v1.view(torch.int8), s1 // 8 + 110), (v2, words_of(s2 // 8 + 110))
    return of1 if "w1" in which else w1, of2 if "w2" in which else w2


@pytest.mark.few
@pytest.mark.parametrize("which", ["w1 and w2", "w1", "w2"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_calls_with_fp4_weights_have_the_bits_of_one_process(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, form: str, world: int, which: str
) -> None:
    monkeypatch.setitem(globals(), "HIDDEN", 256)
    take(form, monkeypatch)
    node = Node(monkeypatch, world, with_fp4(world * HERE, which))
    names = LAUNCHES["apart"] if "w1" in which or form == "apart" else ALL  # after FP4 a kernel activates

    def of_rank(rank: int) -> None:
        layer = node.layer(rank)
        for number, tokens in enumerate((5, MOST, 7, 3 * (rank == 1))):
            one = given(tokens, world, 10 * number + rank)
            got, count = node.ranks.counted(seen.gpu.launches, partial(layer.decode, *one))
            assert number not in (1, 2) or count == counts(*names)
            assert same_bits(got, node.right(one))

    node.ranks.run(of_rank)
    assert None not in seen.made
    assert len(seen.made) == 2 * world - (world == 3), "some tokens and none; rank 1 has always some"


@pytest.mark.few
@pytest.mark.parametrize("of_weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_calls_with_bf16_weights_have_the_bits_of_one_process(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, form: str, world: int, of_weights: torch.dtype
) -> None:
    """Each call rounds weights and tokens of other types. A call that rounds has no record."""
    take(form, monkeypatch)
    g, limit = torch.Generator().manual_seed(0), None if world == 1 else 1.5
    sizes = (world * HERE, 192, HIDDEN), (world * HERE, HIDDEN, 96)
    w1, w2 = (torch.randn(size, generator=g).to(of_weights) / 8 for size in sizes)
    node = Node(monkeypatch, world, (w1, w2))
    names = LAUNCHES["apart"] if form == "apart" else ALL
    names = ["bf16_gemm" if name == "fp8_gemm_rows" else name for name in names]

    def of_rank(rank: int) -> None:
        layer = node.layer(rank, limit=limit)
        for number, tokens in enumerate((5, MOST, 7, 3 * (rank == 1))):
            x, ids, p = given(tokens, world, 10 * number + rank)
            x = x if rank != 1 else x.float() * 1.001
            got, count = node.ranks.counted(seen.gpu.launches, partial(layer.decode, x, ids, p))
            assert number not in (1, 2) or count == counts(*names)
            assert same_bits(got, node.right((x, ids, p), limit=limit))

    node.ranks.run(of_rank)
    assert (None in seen.made) == (world == 3)
    _, said = decode_bytes(world, MOST, TOPK, world * HERE, HIDDEN, 96, peer_memory=True, gran_k=None)
    assert node.room.num_bytes + max(seen.scratch) <= said + 4 * MOST * TOPK + 256 * 12
    layer, apart = node.layer(0), torch.empty(HERE, HIDDEN, 192, dtype=torch.bfloat16)[..., ::2]
    layer.w2 = torch.nn.Parameter(apart)
    seen.cleared()
    with pytest.raises(ValueError, match="w2: expected values contiguous along n or k, got strides"):
        layer.decode(*given(5, world, 0))
    assert not seen.names, "nothing is sent before that is refused"


@pytest.fixture
def node(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return a node of one rank. This thread is the rank."""
    return Node(monkeypatch, 1)


@pytest.fixture
def layer(node: Node) -> Experts:
    return node.layer(0)


def test_scales_of_fp4_are_taken_as_they_lie_or_copied_by_each_call(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales in words are refused if they begin inside of a word; scales in bytes may begin anywhere."""
    monkeypatch.setitem(globals(), "HIDDEN", 256)
    w1, (values, words) = with_fp4(HERE, "w1 and w2")
    node = Node(monkeypatch, 1, (w1, (values, words)))
    apart = torch.cat([w1[1], w1[1][..., :1]], -1)[..., :-1]
    between = torch.cat([w1[1].view(-1)[:2], w1[1].view(-1)])[2:].view(w1[1].shape)
    one, layer = given(5, 1, 0), node.layer(0)
    right = node.right(one)
    for scales, is_recorded in ((w1[1], True), (apart, False), (between, False)):
        layer.w1_scales = scales
        seen.cleared()
        for _ in range(2):
            assert same_bits(layer.decode(*one), right)
        assert seen.made[1:] == ([] if is_recorded else [None])
    layer.w1_scales, layer.w2_scales = w1[1], inside_of_an_element(words)
    with pytest.raises(ValueError, match=r"^sf\w+: expected an address that is a multiple of 4 bytes"):
        layer.decode(*one)
    (values, _), numbers = random_weight(HERE, 256, 256), torch.ones(HERE, 256, 8)
    layer.w2_values, layer.w2_scales = values, numbers
    seen.cleared()
    with pytest.raises(NotImplementedError, match=r"^sfw2: expected UE8M0 beside FP4 where rows go to other GPUs"):
        layer.decode(*one)
    assert not seen.names, "nothing is sent before that is refused"


def test_routes_to_nobody_and_to_one_rank(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 3)

    def of_rank(rank: int) -> None:
        layer, (x, ids, p) = node.layer(rank), given(6, 3, rank)
        for expert in (-1, 0, 3 * HERE - 1, 3 * HERE, -7):  # an id that no expert has counts as -1
            right = node.right((x, torch.full_like(ids, expert if 0 <= expert < 3 * HERE else -1), p))
            assert same_bits(layer.decode(x, torch.full_like(ids, expert), p), right)

    node.ranks.run(of_rank)


def test_ranks_with_a_record_and_without_understand_each_other(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in BF16 are cast by torch in each call."""
    node = Node(monkeypatch, 2)

    def of_rank(rank: int) -> None:
        layer = node.layer(rank)
        for number in range(3):
            x, ids, p = given(7, 2, 2 * number + rank)
            p = p.bfloat16() if rank else p
            assert same_bits(layer.decode(x, ids, p), node.right((x, ids, p)))

    node.ranks.run(of_rank)
    assert sorted(each is None for each in seen.made) == [False, True, True, True]


def test_a_record_launches_what_the_call_itself_does(
    node: Node, layer: Experts, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form, names in LAUNCHES.items():
        take(form, monkeypatch)
        monkeypatch.setattr(node, "weights", weights_of(HERE, 128))
        layer, one = node.layer(0), given(6, 1, 0)
        launches = seen.by_record_as_without(partial(layer.decode, *one))
        assert [kernel for kernel, *_ in launches] == names
        assert not any(is_dependent for *_, is_dependent in launches)


def test_rows_may_lie_apart(node: Node, layer: Experts, seen: Seen) -> None:
    x, ids, p = given(6, 1, 0)
    right = node.right((x, ids, p))
    wide, room = torch.cat([x, x + 1], dim=1), torch.zeros(8, 2 * HIDDEN, dtype=torch.bfloat16)
    out = room[1:7, :HIDDEN]
    calls: list[tuple[Given, Tensor | None]] = [
        ((x, ids, p), None),
        ((wide[:, :HIDDEN], ids, p), None),
        ((x, ids.int(), p), None),
        ((wide[:, :HIDDEN], ids, p), out),
        ((x[:1].expand(6, -1), ids, p), None),
    ]
    for number, (one, into) in enumerate(calls):
        for _ in range(2):
            room.zero_()
            got = layer.decode(*one, out=into)
            assert same_bits(got if into is None else into, node.right(one))
        assert len(seen.made) == number + 1
    assert int(room.count_nonzero()) <= out.numel()
    for tokens in (1, 4):
        layer.decode(wide[:tokens, :HIDDEN], ids[:tokens], p[:tokens], out=out[:tokens])
        assert same_bits(out[:tokens], right[:tokens])
    layer.w1_values, layer.w1_scales = layer.w1_values.clone(), 2 * layer.w1_scales  # other weights in the same layout
    node.weights = layer.held("w1"), layer.held("w2")
    assert same_bits(layer.decode(x, ids, p), node.right((x, ids, p)))
    assert len(seen.made) == len(calls)


def test_what_is_copied_first_has_no_record(node: Node, layer: Experts, seen: Seen) -> None:
    x, ids, p = given(6, 1, 0)
    layer.decode(x, ids, p)
    others: dict[str, Given] = {
        "weights in FP16": (x, ids, p.half()),
        "ids apart": (x, torch.stack([ids, ids], dim=2)[:, :, 0], p),
        "columns apart": (torch.stack([x, x], dim=2)[:, :, 0], ids, p),
        "misaligned": (torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), ids, p),
    }
    for name, one in others.items():
        seen.cleared()
        for _ in range(2):
            assert same_bits(layer.decode(*one), node.right(one)), name
        assert seen.made == [None, None], name


def test_mistakes_are_refused_whatever_records_there_are(node: Node, layer: Experts, seen: Seen) -> None:
    x, ids, p = given(MOST, 1, 0)
    out = torch.zeros_like(x)
    for into in (None, out):
        layer.decode(x, ids, p, out=into)
    right = out.clone()
    seen.cleared()
    more = torch.cat([x, x]), torch.cat([ids, ids]), torch.cat([p, p])
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("x: expected at most max_tokens = 12 tokens, got 24", more),
        (r"topk_weights: expected shape \(tokens, topk\)", (x, ids, p[:5])),
        (r"topk_ids: expected shape \(tokens, topk\)", (x, ids[:5], p)),
        (r"out: expected shape", (x, ids, p, out[:5])),
        ("out: expected rows that do not overlap", (x, ids, p, out.view(-1).as_strided((MOST, HIDDEN), (8, 1)))),
        ("out: expected memory that does not overlap x", (x, ids, p, x)),
        ("x: expected a tensor, got a list of 1", ([1], ids, p)),
        ("topk_ids: expected 3 columns, as in the first call, got 2", (x, ids[:, :2], p[:, :2])),
        ("topk_ids: expected an address that is a multiple of", (x, inside_of_an_element(ids), p)),
        ("topk_weights: expected an address that is a multiple of", (x, ids, inside_of_an_element(p))),
    ]
    for message, one in wrong:
        with pytest.raises((ValueError, TypeError), match=message):
            layer.decode(*one[:3], **dict(zip(["out"], one[3:], strict=False)))
    kept = layer.w1_values
    layer.w1_values = kept.bfloat16()  # as `module.to(torch.bfloat16)` does
    with pytest.raises(ValueError, match=r"w1: expected dtype torch\.float8_e4m3fn, got torch\.bfloat16"):
        layer.decode(x, ids, p)
    layer.w1_values = kept
    assert not seen.names
    beside = torch.cat([x, x], dim=1)  # two column ranges of one matrix
    for _ in range(2):
        layer.decode(beside[:, :HIDDEN], ids, p, out=beside[:, HIDDEN:])
        assert same_bits(beside[:, HIDDEN:], right)


def test_a_rank_that_does_not_come_is_named(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_more_experts_than_the_kernel_counts_get_their_rows_by_torch(seen: Seen) -> None:
    experts = route_rows.MAX_EXPERTS[-1] + 1
    ids = torch.randint(-1, experts, (40, TOPK), generator=torch.Generator().manual_seed(0))
    for got, right in zip(stack_routes(ids, experts), on_cpu(expert_rows)(ids, experts), strict=True):
        assert torch.equal(got, right)
    assert not seen.names


def test_records_keep_no_weights_and_no_rooms(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, 1)
    layer = node.layer(0)
    for tokens in (5, 0):
        layer.decode(*given(tokens, 1, 0))
        layer.decode(*given(tokens, 1, 0), out=torch.empty(tokens, HIDDEN, dtype=torch.bfloat16))
    held = [weakref.ref(each) for each in (layer, *layer.buffers(), layer._peers, *node.memories)]
    assert seen.gpu.records == 4
    seen.cleared()
    node.memories.clear()
    del node, layer
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    assert seen.gpu.records == 4
