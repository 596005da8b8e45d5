"""The forms by collectives, without a GPU: the values at the addresses of launches, by records and without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import addressed_kernels
import pytest
import test_distributed_decode
import torch
from addressed_kernels import Seen, computing
from helpers import group_of_one, inside_of_an_element, same_bits, some
from mega_cases import weights_on_gpu
from rank_threads import Ranks
from test_distributed_decode import HERE, HIDDEN, Given, counts, given, part, weights_of, with_fp4
from torch import Tensor

import deep_gemm
from deep_gemm.across import by_group, experts, message
from deep_gemm.core import call
from deep_gemm.core.check.checks import Operand
from deep_gemm.distributed import Experts
from deep_gemm.moe import api as layers
from deep_gemm.moe import route_rows, routing
from deep_gemm.moe.api import experts_workspace_bytes

ALL = [
    *("plan_sends", "pack_rows", "route_rows", "gather_rows", "fp8_gemm_rows"),
    *("fp8_gemm_rows", "gather_weighted", "gather_weighted"),
]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    monkeypatch.setattr(experts, "agree_about_decode", lambda *_: None)
    of_sums = routing.SUMMED, routing.WEIGHTED, routing.WEIGHTED_INTO
    return addressed_kernels.install(monkeypatch, by_group.PLANNED, message.PACKED, experts.SUMS, *of_sums)


class Layers:
    """The layer of a rank, and an equal layer whose calls torch computes."""

    def __init__(self, rank: int, weights: Sequence[Operand | Tensor], **more: Any) -> None:
        first = weights[0]
        count, (w1, w2) = len(first if isinstance(first, Tensor) else first[0]), part(weights, rank)
        self.layer, self.torchs = (Experts(count, w1, w2, **more) for _ in range(2))
        self.layer.planner().has_kernel = True

    def __call__(self, *given: Any) -> Tensor:
        out: Tensor = self.layer(*given)
        return out

    def right(self, *given: Any) -> Tensor:
        with computing():
            out: Tensor = self.torchs(*given)
        return out


@pytest.fixture
def layer(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> Layers:
    """Return the layers of the only rank. This thread is the rank."""
    Ranks(monkeypatch, 1)
    return Layers(0, weights_of(HERE, 80))


@pytest.mark.few
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.int64), (torch.float32, torch.int32)])
@pytest.mark.parametrize("intermediate", [144, 256])
def test_calls_have_the_bits_of_torchs(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, intermediate: int, types: Any, many: bool
) -> None:
    world, limit = 2, None if many else 1.5
    monkeypatch.setattr(layers, "MANY_ROWS", 1 if many else 10**6)
    monkeypatch.setattr(route_rows, "PART", 32)
    monkeypatch.setattr(route_rows, "PARTS_ALONE", 0 if many else 100)
    ranks, weights = Ranks(monkeypatch, world), weights_of(world * HERE, intermediate)
    expected = counts(*ALL, *([] if intermediate == 256 and many else ["cast_rows"]), *["count_routes"] * many)

    def of_rank(rank: int) -> None:
        layer = Layers(rank, weights, limit=limit, max_tokens=37)
        for number, tokens in enumerate((5, 1, 37, 5, 3 * (rank == 1), 0, 9)):
            one = given(tokens, world, 10 * number + rank, *types)
            got, count = ranks.counted(seen.gpu.launches, partial(layer, *one))
            assert tokens <= 3 or count == expected
            right = layer.right(*one)
            assert same_bits(got, right)
            assert same_bits(layer.layer.decode(*one), right)

    ranks.run(of_rank)
    assert None not in seen.made
    made = len(seen.made)
    ranks.run(of_rank)
    assert len(seen.made) == made, "the same calls have records"
    sizes = 37 * world, test_distributed_decode.TOPK, HERE, HIDDEN, intermediate
    assert max(seen.scratch) < experts_workspace_bytes(*sizes), "parts that are not needed at once share memory"


@pytest.mark.few
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("which", ["w1 and w2", "w1", "w2"])
def test_calls_with_fp4_weights_have_the_bits_of_torchs(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, which: str, many: bool
) -> None:
    monkeypatch.setattr(test_distributed_decode, "HIDDEN", 256)
    monkeypatch.setattr(layers, "MANY_ROWS", 1 if many else 10**6)
    ranks, both = Ranks(monkeypatch, 2), with_fp4(2 * HERE, which)
    expected = counts(*ALL, *([] if which == "w2" and many else ["cast_rows"]))

    def of_rank(rank: int) -> None:
        layer = Layers(rank, both)
        for number, tokens in enumerate((5, 37, 7, 3 * (rank == 1))):
            one = given(tokens, 2, 10 * number + rank)
            got, count = ranks.counted(seen.gpu.launches, partial(layer, *one))
            assert number not in (1, 2) or count == expected
            assert same_bits(got, layer.right(*one))
            with computing():
                right = some(deep_gemm.experts(*one, *both))
            assert deep_gemm.calc_diff(got, right) < 1e-5, "sums are rounded on each rank"

    ranks.run(of_rank)
    assert None not in seen.made


@pytest.mark.few
@pytest.mark.parametrize("most", [1, 5])
def test_decoded_tokens_in_bf16_have_the_bits_of_torchs_and_few_take_two_launches(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The kernel for few tokens computes one row from each of two ranks."""
    ranks, g = Ranks(monkeypatch, 2), torch.Generator().manual_seed(0)
    both = [torch.randn(2 * HERE, *size, generator=g).bfloat16() / 8 for size in ((192, HIDDEN), (HIDDEN, 96))]
    six = "route_rows", "cast_rows", "bf16_gemm", "cast_rows", "bf16_gemm"
    expected = counts(*(six if most > 1 else ["experts_few"] * 2), "gather_weighted", "gather_weighted")

    def of_rank(rank: int) -> None:
        layer = Layers(rank, both, max_tokens=most, products="bf16", limit=1.5)
        for number, tokens in enumerate((most, 1, rank, 0)):
            one = given(tokens, 2, 10 * number + rank)
            got, count = ranks.counted(seen.gpu.launches, partial(layer.layer.decode, *one))
            assert number != 1 or count == expected  # call 0 launches more kernels, which later calls do not need
            with computing():
                assert same_bits(got, some(layer.torchs.decode(*one)))

    ranks.run(of_rank)
    assert None not in seen.made


def test_each_part_is_one_record(layer: Layers, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a part launches by its record the same kernels, in order, as without a record."""
    functions: list[call.Function] = []
    recorded = call.recorded

    def noted(function: call.Function, *given: Any) -> Any:
        functions.append(function)
        return recorded(function, *given)

    monkeypatch.setattr(call, "recorded", noted)
    launches = seen.by_record_as_without(partial(layer, *given(6, 1, 0)))
    assert [kernel for kernel, *_ in launches] == [*ALL[:5], "cast_rows", *ALL[5:]]
    assert functions == [by_group.PLANNED, message.PACKED, experts.SUMS, routing.SUMMED]
    layer(*given(5, 1, 1))
    assert len(functions) == 4


def test_routes_to_nobody_and_to_one_rank(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    world = 3
    ranks = Ranks(monkeypatch, world)

    def of_rank(rank: int) -> None:
        layer, (x, ids, p) = Layers(rank, weights_of(world * HERE, 80)), given(6, world, rank)
        for expert in (-1, 0, world * HERE - 1):
            one = x, torch.full_like(ids, expert), p
            assert same_bits(layer(*one), layer.right(*one))

    ranks.run(of_rank)
    assert None not in seen.made


def test_tokens_and_weights_may_lie_apart(layer: Layers, seen: Seen) -> None:
    x, ids, p = given(6, 1, 0)
    others: dict[str, Given] = {
        "rows apart": (torch.cat([x, x], dim=1)[:, :HIDDEN], ids, p),
        "ids apart": (x, torch.stack([ids, ids], dim=2)[:, :, 0], p),
        "weights in FP16": (x, ids, p.half()),
        "misaligned": (torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), ids, p),
        "int32": (x, ids.int(), p),
    }
    layer(x, ids, p)
    for name, one in others.items():
        seen.cleared()
        for _ in range(2):
            assert same_bits(layer(*one), layer.right(*one)), name
        assert (None in seen.made) == (name not in ("rows apart", "int32")), name
    for of in (layer.layer, layer.torchs):  # other weights in the same layout, and some with other strides
        of.w1_values, of.w1_scales = of.w1_values.clone(), 2 * of.w1_scales
    seen.cleared()
    assert same_bits(layer(x, ids, p), layer.right(x, ids, p))
    assert not seen.made
    w = layer.layer.w1_values
    layer.layer.w1_values = torch.cat([w.view(torch.uint8)] * 2, dim=1).view(w.dtype)[:, : w.shape[1]]
    for _ in range(2):
        assert same_bits(layer(x, ids, p), layer.right(x, ids, p))
    assert len(seen.made) == 1 and None not in seen.made


def test_mistakes_are_refused_on_each_rank_whatever_records_there_are(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 2)

    def of_rank(rank: int) -> None:
        layer = Layers(rank, weights_of(2 * HERE, 80), room=11 if rank else None)
        x, ids, p = given(6, 2, rank)
        layer(x[:2], ids[:2], p[:2])
        with pytest.raises(ValueError, match=r"room: expected at least 12 rows on rank 1, which come there, got 11"):
            layer(x, torch.full_like(ids, 2 * HERE - 1), p)
        learned = x.clone().requires_grad_(bool(rank))
        for one, said in (
            ((x, ids, p[: 6 - rank]), "^x: expected a tensor|expected shape"),
            ((learned, ids, p), "without a gradient"),
            ((x, inside_of_an_element(ids) if rank else ids, p), "expected an address that is a multiple of"),
            ((x, ids, inside_of_an_element(p) if rank else p), "expected an address that is a multiple of"),
        ):
            with pytest.raises((ValueError, TypeError), match=said if rank else "rank 1 were refused there"):
                layer(*one)
        with torch.no_grad():
            layer(learned[:2], ids[:2], p[:2])

    ranks.run(of_rank)


@pytest.mark.gpu
def test_one_gpu_over_nccl_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        num, hidden, inter, topk = 8, 512, 256, 4
        g = torch.Generator("cuda").manual_seed(0)
        w1, w2 = weights_on_gpu(num, hidden, inter, g)
        layer = Experts(num, w1, w2)
        for tokens in (24, 1, 900, 24, 0, 899, 4096, 901):  # from 2048 routes on, the first product activates
            x = torch.randn(tokens, hidden, device="cuda", generator=g).bfloat16()
            ids = torch.randint(-1, num, (tokens, topk), device="cuda", generator=g)
            one = x, ids, torch.rand(tokens, topk, device="cuda", generator=g)
            right = some(deep_gemm.experts(*one, w1, w2))
            torch.empty(1 << 26, device="cuda").fill_(torch.nan)  # a later buffer may get this memory
            assert torch.equal(layer(*one), right), tokens
