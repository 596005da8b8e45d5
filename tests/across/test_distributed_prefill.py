"""Prepared calls of the prefill form, without a GPU: what kernels find at their addresses, and who goes which way."""

from __future__ import annotations

import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import addressed_kernels
import pytest
import test_distributed_decode
import torch
from helpers import group_of_one, inside_of_an_element, same_bits, some
from mega_cases import weights_on_gpu
from rank_threads import Ranks
from test_distributed_decode import HERE, HIDDEN, MODES, Given, given, weights_of, with_fp4
from torch import Tensor

import deep_gemm
from deep_gemm.across import experts, prefill
from deep_gemm.core.settings import set_compile_mode
from deep_gemm.distributed import Experts
from deep_gemm.moe import prepared, route_rows

ALL = {"plan_sends": 1, "pack_rows": 1, "route_rows": 1, "gather_rows": 1, "gather_weighted": 2, "fp8_gemm_rows": 2}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return addressed_kernels.install(monkeypatch)


def layer_of(rank: int, world: int, intermediate: int = 80, **more: Any) -> Experts:
    layer = Experts(world * HERE, *weights_of(rank, world, intermediate), **more)
    layer.planner().has_kernel = True
    return layer


@pytest.fixture
def layer(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Experts:
    """The layer of the only rank, which this thread is."""
    Ranks(monkeypatch, 1)
    return layer_of(0, 1)


def by_tensors(layer: Experts, given: Given) -> Tensor:
    """The result of a call that nobody has prepared."""
    kept, layer._prefills = layer._prefills, []
    try:
        out: Tensor = layer(*given)
    finally:
        layer._prefills = kept
    return out


@pytest.mark.few
@pytest.mark.parametrize("many", [0, 10**6])
@pytest.mark.parametrize("types", [(torch.bfloat16, torch.int64), (torch.float32, torch.int32)])
@pytest.mark.parametrize("intermediate", [144, 256])
def test_prepared_calls_have_the_bits_of_calls_by_tensors(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, intermediate: int, types: Any, many: int
) -> None:
    world, limit = 2, 1.5 if many else None
    monkeypatch.setattr(prefill, "MANY_ROWS", many)
    monkeypatch.setattr(route_rows, "PART", 32)
    monkeypatch.setattr(route_rows, "PARTS_ALONE", 100 if many else 0)
    ranks = Ranks(monkeypatch, world)

    def of_rank(rank: int) -> None:
        layer = layer_of(rank, world, intermediate, limit=limit)
        layer(*given(5, world, rank, *types))
        assert len(layer._prefills) == 1
        for call, tokens in enumerate((1, 37, 5, 3 * (rank == 1), 0, 9)):
            one = given(tokens, world, 10 * call + rank, *types)
            right = by_tensors(layer, one)
            got, count = ranks.counted(launched, partial(layer, *one))
            casts = {} if intermediate == 256 and not many else {"cast_rows": 1}
            parts = {} if many else {"count_routes": 1}
            assert tokens <= 3 or count == {**ALL, **casts, **parts}
            assert same_bits(got, right)
        assert len(layer._prefills) == 1

    ranks.run(of_rank)


@pytest.mark.few
@pytest.mark.parametrize("many", [0, 10**6])
@pytest.mark.parametrize("which", ["w1 and w2", "w1", "w2"])
def test_prepared_calls_with_fp4_weights_have_the_bits_of_one_process(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch, which: str, many: int
) -> None:
    monkeypatch.setattr(test_distributed_decode, "HIDDEN", 256)
    monkeypatch.setattr(prefill, "MANY_ROWS", many)
    ranks, both = Ranks(monkeypatch, 2), with_fp4(2 * HERE, which)
    casts = {} if which == "w2" and not many else {"cast_rows": 1}

    def of_rank(rank: int) -> None:
        w1, w2 = ((values[rank * HERE :][:HERE], scales[rank * HERE :][:HERE]) for values, scales in both)
        layer = Experts(2 * HERE, w1, w2)
        layer.planner().has_kernel = True
        for call, tokens in enumerate((5, 37, 7, 3 * (rank == 1))):
            one = given(tokens, 2, 10 * call + rank)
            got, count = ranks.counted(launched, partial(layer, *one))
            assert call not in (1, 2) or count == {**ALL, **casts}
            right = some(deep_gemm.experts(*one, *both))
            assert deep_gemm.calc_diff(got, right) < 1e-5, "sums are rounded on each rank"
            assert torch.equal(by_tensors(layer, one), got)
        assert len(layer._prefills) == 1

    ranks.run(of_rank)


def test_routes_to_nobody_and_to_one_rank(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    world = 3
    ranks = Ranks(monkeypatch, world)

    def of_rank(rank: int) -> None:
        layer = layer_of(rank, world)
        x, ids, p = given(6, world, rank)
        layer(x, ids, p)
        for expert in (-1, 0, world * HERE - 1):
            one = x, torch.full_like(ids, expert), p
            assert torch.equal(layer(*one), by_tensors(layer, one))

    ranks.run(of_rank)


def test_ranks_that_go_different_ways_understand_each_other(
    launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 2)

    def of_rank(rank: int) -> None:
        layer = layer_of(rank, 2)
        one = given(7, 2, rank)
        right = layer(*one)
        got = layer(*one) if rank else by_tensors(layer, one)
        assert torch.equal(got, right)

    ranks.run(of_rank)


def test_what_was_not_prepared_goes_by_tensors(layer: Experts, launched: Counter[str]) -> None:
    x, ids, p = given(6, 1, 0)
    right = layer(x, ids, p)
    launched.clear()
    others = {
        "rows apart": (torch.cat([x, x], dim=1)[:, :HIDDEN], ids, p),
        "weights in FP16": (x, ids, p.half()),
        "misaligned": (torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape), ids, p),
    }
    for name, one in others.items():
        launched.clear()
        got = layer(*one)
        assert launched["route_rows"] == 0, name
        assert name == "weights in FP16" or torch.equal(got, right), name
    assert len(layer._prefills) == 1
    layer(x, ids.int(), p)
    assert len(layer._prefills) == 2
    launched.clear()
    for one in ((x, ids, p), (x, ids.int(), p)):
        assert torch.equal(layer(*one), right)
    assert launched["route_rows"] == 2
    old = weakref.ref(layer.w1_values)
    layer.w1_values, layer.w1_scales = layer.w1_values.clone(), 2 * layer.w1_scales  # others of the same kind
    assert old() is None, "weights that nobody needs stay in memory"
    assert torch.equal(layer(x, ids, p), by_tensors(layer, (x, ids, p)))
    assert launched["route_rows"] == 3
    w = layer.w1_values
    apart = torch.cat([w.view(torch.uint8)] * 2, dim=1).view(w.dtype)[:, : w.shape[1]]
    layer.w1_values = apart  # further from expert to expert
    got = layer(x, ids, p)
    assert launched["route_rows"] == 3
    assert torch.equal(layer(x, ids, p), got)
    assert launched["route_rows"] == 4


def test_each_mode_of_torch_is_prepared_once(
    layer: Experts, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = given(6, 1, 0)
    right = layer(*one)
    for mode in MODES:
        with mode():
            layer(*one)
            kinds = len(layer._prefills)
            launched.clear()
            for _ in range(3):
                assert torch.equal(layer(*one), right)
            assert launched["route_rows"] == 3
        assert len(layer._prefills) == kinds <= 3
    monkeypatch.setattr(experts, "MAX_KINDS", kinds)
    x, ids, p = one
    for _ in range(2):
        layer(x.float(), ids, p)
    assert len(layer._prefills) == kinds


def test_mistakes_are_those_of_calls_by_tensors(launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 2)

    def of_rank(rank: int) -> None:
        layer = layer_of(rank, 2, room=11 if rank else None)
        x, ids, p = given(6, 2, rank)
        layer(x[:2], ids[:2], p[:2])
        with pytest.raises(ValueError, match=r"room: expected at least 12 rows on rank 1, which come there, got 11"):
            layer(x, torch.full_like(ids, 2 * HERE - 1), p)
        wrong = r"^x: expected a tensor|expected shape" if rank else r"the arguments of rank 1 were refused there"
        with pytest.raises((ValueError, TypeError), match=wrong):
            layer(x, ids, p[: 6 - rank])
        learned = x.clone().requires_grad_(bool(rank))
        with pytest.raises(ValueError, match="without a gradient" if rank else "rank 1 were refused"):
            layer(learned, ids, p)
        with torch.no_grad():
            layer(learned[:2], ids[:2], p[:2])

    ranks.run(of_rank)


def test_a_call_that_only_compiles_goes_by_tensors(layer: Experts, launched: Counter[str]) -> None:
    one = given(6, 1, 0)
    layer(*one)
    launched.clear()
    (made,) = layer._prefills
    tokens, weights = prepared.Tokens(*one), prepared.Weights(*layer.weights())
    assert made.is_right(tokens, weights)
    set_compile_mode(1)
    assert not made.is_right(tokens, weights)


@pytest.mark.gpu
def test_one_gpu_over_nccl_gives_the_bits_of_calls_by_tensors(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        num, hidden, inter, topk = 8, 512, 256, 4
        g = torch.Generator("cuda").manual_seed(0)
        w1, w2 = weights_on_gpu(num, hidden, inter, g)
        layer = Experts(num, w1, w2)
        for call, tokens in enumerate((24, 1, 900, 24, 0, 899, 4096, 901)):  # from 2048 routes on product 1 activates
            x = torch.randn(tokens, hidden, device="cuda", generator=g).bfloat16()
            ids = torch.randint(-1, num, (tokens, topk), device="cuda", generator=g)
            one = x, ids, torch.rand(tokens, topk, device="cuda", generator=g)
            right = by_tensors(layer, one)
            torch.empty(1 << 26, device="cuda").fill_(torch.nan)  # memory that a buffer may get
            got = layer(*one)
            assert torch.equal(got, right), tokens
            assert len(layer._prefills) == 1, call


def test_tensors_that_begin_at_any_byte_are_refused(layer: Experts) -> None:
    x, ids, p = given(6, 1, 0)
    for _ in range(2):
        for wrong in ((x, inside_of_an_element(ids), p), (x, ids, inside_of_an_element(p))):
            with pytest.raises(ValueError, match="expected an address that is a multiple of"):
                layer(*wrong)
        layer(x, ids, p)
