"""`bench fp4_dense`, `fp4_masked`, `fp4_contiguous` and `fp4_experts`, what needs no GPU of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_benchmark import NoFlush, invoke
from test_benchmark_rivals import contenders, small_case

import deep_gemm
from lab.bench import benches, bulk_read, command, experts, fp4, fp4_experts, layers, products
from lab.bench.bench import planned
from lab.bench.bulk_read import READ
from lab.bench.cases import FP4_DENSE, Case
from lab.bench.contenders import OURS
from lab.bench.fp4 import FP8, HUMMING
from lab.bench.linear import relative_error
from lab.bench.report import Report, Row
from lab.bench.timing import KernelEvent, Spread
from lab.sim.launcher import Stage

# Cases


def test_judged_weights_are_those_of_experts_to_which_nothing_was_tuned() -> None:
    found = products.cases_of(FP4_DENSE)
    judged = {case.shape[1:] for case in found if case.is_judged}
    assert judged >= {(4096, 4096), (4096, 2048), (6144, 7168), (4608, 5120), (4096, 6144), (5760, 2880), (2880, 2880)}
    assert {case.shape[1:] for case in found if not case.is_judged} == fp4.FITTED
    assert not judged & fp4.FITTED
    assert {case.shape[0] for case in found} == set(fp4.MS)
    weights = [case.shape[1:] for case in found]
    assert len(set(weights)) == sum(a != b for a, b in pairwise(weights)) + 1, "those with the same weight lie together"


def test_what_the_aims_name_is_measured() -> None:
    shapes = {case.shape for case in products.cases_of("fp4_masked")}
    assert {(8, 16, 4096, 7168), (8, 48, 4096, 7168)} <= shapes
    assert {(48, 8, tokens, 6144, 2048) for tokens in (8, 32, 128, 256)} <= set(fp4_experts.shapes_of())
    assert set(fp4_experts.shapes_of(quick=True)) < set(fp4_experts.shapes_of())


def test_bytes_are_those_of_half_a_byte_a_value_and_a_scale_for_32() -> None:
    of_rows = 16 * (7168 + 4 * 56) + 16 * 4096 * 2
    assert Case(FP4_DENSE, (16, 4096, 7168)).bytes == 4096 * (7168 // 2 + 7168 // 32) + of_rows
    masked = Case("fp4_masked", (2, 8, 4096, 7168), sizes=(16, 0))
    assert masked.bytes == 4096 * (7168 // 2 + 7168 // 32) + of_rows, "a group without rows needs no weight"


# Contenders


def test_the_rival_is_given_the_same_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class HummingLayer:
        """What the rival does, by torch."""

        def __init__(self, **said: Any) -> None:
            self.said, self.is_laid_out = said, False
            made.append(self)

        def to(self, device: torch.device) -> HummingLayer:
            return self

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            self.w = deep_gemm.cast_back_from_fp4(tensors["weight"], tensors["weight_scale"], 32)

        def transform(self) -> None:
            self.is_laid_out = True

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            assert self.is_laid_out
            return (x.float() @ self.w.t()).bfloat16()

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=HummingLayer))
    fp4.weights_of.cache_clear()
    rival = contenders(FP4_DENSE)[HUMMING]
    assert rival.error() < 4e-3
    assert rival.error() < 4e-3
    (layer,) = made
    assert (layer.said["shape_n"], layer.said["shape_k"]) == (64, 288)
    fp4.weights_of.cache_clear()


def test_the_products_part_of_a_call_is_its_longest_kernel() -> None:
    calls = [(KernelEvent("cast", 0, 2), KernelEvent("product", 3, us)) for us in (5, 9, 6)]
    assert products.product_alone(calls) == {"product": 6}


@pytest.fixture(scope="module")
def layer() -> fp4_experts.Fp4Experts:
    return fp4_experts.Fp4Experts((4, 2, 6, 256, 128), fp4_experts.weights_of(4, 256, 128, "cpu"))


def test_layers_of_both_kinds_of_weights_are_near_each_other(layer: fp4_experts.Fp4Experts) -> None:
    ways = {way.name: way for way in layer.contenders()}
    assert tuple(ways) == fp4_experts.CONTENDERS
    assert layer.check(ways[OURS].call)[1] is None
    ways[FP8].call()
    assert relative_error(layer.out_of_eager, layer.out) < 2 * experts.MOST_ERROR, "weights are rounded too"
    assert "elements differ from the parts" in str(layer.check(lambda: None)[1])
    packed, words = layer.weights.w1
    assert packed.shape == (4, 256, 128) and words.dtype == torch.int32
    used = len(set(layer.topk_ids.flatten().tolist()))
    of_expert = (2 * 128 * 256 + 256 * 128) * 17 // 32
    assert layer.work.bytes == used * of_expert + 2 * 6 * 256 * 2
    row = layer.work.row(READ, us=1.0)
    assert (row.bytes, row.operations) == (layer.work.bytes, None)


# Reading


@pytest.mark.host_compiler
@pytest.mark.parametrize(("slots", "count"), [(3, 16 * 1000), (3, 1024 * 7), (12, 16), (2, 1024 * 41 + 16)])
def test_the_yardstick_reads_all_once_and_ends(slots: int, count: int) -> None:
    config, source = replace(bulk_read.CONFIG, slots=slots, chunk=1024), bulk_read.read_of(count)
    for seed in range(3):
        stage = Stage(config, {"x": source}, {}, {"x": 16}, num_sms=2, seed=seed)
        stage.run(bulk_read.KERNEL, None, lambda _, at: bulk_read.params_of(at["x"]), 3)
        assert stage.result().loads == -(-count // 1024)


def test_the_yardstick_compiles_and_refuses_what_it_cannot_read() -> None:
    assert bulk_read.KERNEL.build(bulk_read.CONFIG).cubin
    assert bulk_read.CONFIG.shared_bytes <= 227 * 1024
    assert bulk_read.read_of(17).shape == (32,)
    for source in (torch.empty(8, dtype=torch.uint8), torch.empty(8, 64)[:, :32]):
        with pytest.raises(ValueError, match="source: expected whole 16 bytes that lie together"):
            bulk_read.params_of(source)


# Runs


def test_a_run_of_experts(monkeypatch: pytest.MonkeyPatch, layer: fp4_experts.Fp4Experts, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(experts, "L2Flush", NoFlush)
    monkeypatch.setattr(layers, "captured", lambda call: (call(), call)[1])
    call = (KernelEvent("cast_rows", 0, 3.0), KernelEvent("fp8_gemm", 4, 10.0), KernelEvent("fp8_gemm", 20, 10.0))

    def recorded(
        calls: dict[str, Any], flush: object, repeats: int, while_busy: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        while_busy()
        return {name: [call] * repeats for name in calls}

    monkeypatch.setattr(layers, "recorded", recorded)
    measure = partial(experts.measure, fp4_experts.Fp4Experts, lambda *_: layer.weights)
    plan = planned(lambda quick: [(4, 2, 6, 256, 128), (4, 2, 1, 256, 128)], measure, (5,), "")
    monkeypatch.setitem(benches.BENCHES, "fp4_experts", replace(fp4_experts.BENCH, plan=plan))
    out = tmp_path / "result.json"
    code, output = invoke("bench", "fp4_experts", "--out", str(out))
    assert code == 0, output
    rows = Report.load(out).rows
    assert [row.contender for row in rows] == list(fp4_experts.CONTENDERS) * 2
    assert all(row.us == 30 and row.kind == "fp4_experts" and not row.failed for row in rows)
    assert "4x2x6x256x128" in output


def test_times_survive_a_file(tmp_path: Path) -> None:
    row = Row.of(small_case(FP4_DENSE), HUMMING, "cold", Spread(2.0, 1.0, 3.0), parts={"product": 1.5})
    header = dict.fromkeys(("kind", "date", "machine", "versions", "commit", "dirty", "source_sha256", "method"), "")
    Report(header, [row]).save(tmp_path / "r.json")
    (again,) = Report.load(tmp_path / "r.json").rows
    assert (again.shape, again.parts, again.fast_shape) == (row.shape, {"product": 1.5}, None)
