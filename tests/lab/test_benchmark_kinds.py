"""The parts of benches with cold timing that need no GPU: operands are on the CPU, and times are made up."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import raising, some
from test_benchmark import NoFlush, measured
from test_benchmark_rivals import contenders, small_case
from torch import Tensor

import deep_gemm
from deep_gemm.core.check.recipes import BLOCKS_OF_32, BLOCKS_OF_64, MX, PER_64, PER_BLOCK, PER_ROW
from deep_gemm.core.gpu import GPUS
from lab.bench import (
    attention,
    benches,
    bf16,
    bf16_experts,
    bulk_read,
    casts,
    command,
    einsum,
    experts,
    few_experts,
    fine,
    fp4,
    fp4_experts,
    hc,
    kinds,
    layers,
    logits_paged,
    logits_prefill,
    products,
    rows,
    skip_head_mid,
    tune,
    yardsticks,
)
from lab.bench.bench import Asked, planned
from lab.bench.bulk_read import READ
from lab.bench.cases import FINE_DENSE, FP4_DENSE, Case
from lab.bench.contenders import BF16, OURS
from lab.bench.experts_by_torch import chains_in_bf16
from lab.bench.fp4 import FP8, HUMMING, VLLM
from lab.bench.kinds import Kind, Kinds, Work
from lab.bench.layers import ALONE, COPY, EAGER
from lab.bench.linear import relative_error
from lab.bench.report import Report, Row
from lab.bench.timing import KernelEvent, L2Flush, Spread
from lab.sim.launcher import Stage

Make = Callable[..., Work]
NOT_ON_A_CPU = EAGER, rows.FAST, rows.EXACT, rows.CUTLASS
"""Contenders that may be missing on a CPU."""
MODULES: tuple[Any, ...] = (attention, bf16, hc, einsum, casts, rows)
SMALL: Mapping[str, tuple[ModuleType, Make, tuple[int, ...], tuple[str, ...]]] = {
    "mqa_logits": (logits_prefill, logits_prefill.mqa_logits, (5, 40, 16, 32), (OURS, EAGER)),
    "clean": (logits_prefill, partial(logits_prefill.mqa_logits, clean=True), (5, 40, 16, 32), (OURS, EAGER)),
    "paged_mqa_logits": (logits_paged, logits_paged.paged_mqa_logits, (3, 2, 16, 32, 100), (OURS,)),
    "hc_prenorm": (hc, hc.work_of, (5, 24, 256, 0), (OURS, EAGER, COPY)),
    "hc_prenorm, splits": (hc, hc.work_of, (5, 24, 256, 4), (OURS, EAGER, COPY)),
    "fp8_einsum": (einsum, einsum.work_of, (5, 3, 272, 136), (OURS, einsum.ROW_MAJOR, BF16)),
    "skip_head_mid": (skip_head_mid, skip_head_mid.work_of, (3, 512, 256), (OURS, ALONE)),
    "rows": (rows, rows.dense, (70, 24, 48), (OURS, *NOT_ON_A_CPU[1:], rows.BLOCKS)),
    "bf16 dense": (bf16, bf16.dense, (70, 24, 16), (OURS, EAGER)),
    "bf16 wgrad": (bf16, bf16.wgrad, (16, 24, 40), (OURS, EAGER)),
    "bf16 contiguous": (bf16, bf16.contiguous, (2, 70, 24, 16), (OURS, EAGER)),
    "bf16 uneven": (bf16, partial(bf16.contiguous, uneven=True), (2, 100, 24, 16), (OURS, EAGER)),
    "bf16 masked": (bf16, bf16.masked, (3, 10, 24, 16), (OURS,)),
    "bf16 along k": (bf16, bf16.along_k, (2, 16, 24, 64), (OURS,)),
    "bf16 along k, counted": (bf16, partial(bf16.along_k, counted=True), (2, 16, 24, 40), (OURS,)),
    **{
        expr: (bf16, bf16.expression(expr), (6, 8, 16, 64), (OURS, EAGER))
        for expr in ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr")
    },
}
"""Each work: the module whose functions it calls, the function that makes it, a shape, and the contenders."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the timer; return a list that receives how often each call would have been timed."""
    repeats: list[int] = []

    def cold(calls: Mapping[str, Any], flush: object, times: int) -> dict[str, tuple[Spread, tuple[str, ...]]]:
        repeats.append(times)
        return {name: (Spread(2.0, 1.0, 3.0), (name,)) for name in calls}

    monkeypatch.setattr(kinds, "cold", cold)
    monkeypatch.setattr(kinds, "L2Flush", NoFlush)
    return repeats


def rows_of(work: Work, *only: str) -> list[Row]:
    flush: Any = NoFlush()
    return Kinds({}).rows_of("kind", (1, 2), work, flush, only)


@pytest.mark.parametrize("name", SMALL)
def test_each_work_is_right_and_a_wrong_one_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, make, shape, contenders = SMALL[name]
    torch.manual_seed(1)  # with this seed, no product equals D's old values by chance
    work = make(shape, device="cpu")
    assert work.bytes > 0 and (work.operations or 0) > 0 and (work.floor_us or 0) > 0
    of_work = rows_of(work)
    assert {row.contender for row in of_work} == set(contenders)
    assert all(row.us == 2.0 and row.failed is None for row in of_work if row.contender not in NOT_ON_A_CPU)
    assert [row.contender for row in rows_of(work, OURS)] == [OURS]
    for each in vars(module).copy():
        if "gemm" in each or each in ("einsum", "fp8_einsum", "compute"):
            monkeypatch.setattr(module, each, lambda *_, **__: None)
    if hasattr(module, "api"):
        monkeypatch.setattr(module.api, "compute", lambda _: None)
    (wrong,) = rows_of(work, OURS)
    assert wrong.failed is not None and wrong.failed.startswith("wrong: ")


def test_torch_computes_what_ours_does() -> None:
    p = logits_prefill.causal_problem((5, 40, 16, 32), clean=False, device="cpu")
    assert logits_prefill.difference(p) < 1e-9
    in_range = torch.arange(40) < p.ends[:, None]
    torch.testing.assert_close(p.logits[in_range], logits_prefill.in_torch(p)[in_range], rtol=0.05, atol=0.5)
    q = hc.problem((5, 24, 256, 4), device="cpu")
    assert hc.difference(q) == 0
    d, sqr_sum = hc.in_torch(q)
    torch.testing.assert_close(q.d, d, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(q.sqr_sum, sqr_sum)


def test_what_lies_between_parts_of_heads_must_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def touches(a: Any, b: Any, d: torch.Tensor, splits: Any) -> None:
        deep_gemm.fp8_gemm_nt_skip_head_mid(a, b, d, splits)
        d[1, 128] = 0

    work = skip_head_mid.work_of((3, 512, 256), "cpu")
    monkeypatch.setattr(skip_head_mid, "fp8_gemm_nt_skip_head_mid", touches)
    assert work.checks[OURS]() == (None, "wrong: 1 elements between parts were written")


def test_contexts_have_the_mean_that_is_asked_for() -> None:
    assert logits_paged.metadata((3, 2, 1000), device="cpu").checks[OURS]() == (0, None)
    contexts = logits_paged.contexts_of((16, 2, 64, 128, 8192), device="cpu")
    assert abs(float(contexts[:, 1].float().mean()) - 8192) < 1
    assert 0.69 * 8192 < int(contexts.min()) < int(contexts.max()) < 1.31 * 8192
    assert logits_paged.contexts_of((1, 1, 64, 128, 8192), device="cpu").tolist() in ([[8347]], [[8346]])


def test_a_contender_that_fails_leaves_its_reason_and_the_others() -> None:
    broken = raising(RuntimeError("launch failed\nand more"))
    rows = rows_of(Work(10, 20, {OURS: broken, EAGER: lambda: None}, kinds.of_ours(lambda: 0.0, 1.0)))
    assert [(row.contender, row.failed, row.us) for row in rows] == [
        (EAGER, None, 2.0),
        (OURS, "RuntimeError: launch failed", None),
    ]
    (row,) = rows_of(Work(None, 20, {OURS: lambda: None}, kinds.of_ours(lambda: torch.nan, 1.0)))
    assert (row.failed, row.floor_us, row.bytes) == ("wrong: difference nan, expected at most 1.0", None, 20)
    assert rows_of(Work(10, 20, {OURS: broken}, {}), EAGER) == []


@pytest.mark.parametrize(("operations", "times"), [(10**9, 15), (10**13, 8), (10**15, 3)])
def test_long_calls_are_repeated_less(operations: int, times: int, clock: list[int]) -> None:
    flush: Any = NoFlush()
    work = Work(operations, 20, {OURS: lambda: None}, {})
    Kinds({}, repeats=15, seconds=0.05).rows_of("kind", (1,), work, flush)
    assert clock == [times]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_few_shapes_are_some_of_all_and_those_that_deepgemm_was_timed_at_are_there(module: Any) -> None:
    listed = module.KINDS.shapes_of()
    assert 0 < len(module.KINDS.shapes_of(quick=True)) < len(listed) == len(set(listed))
    assert set(module.KINDS.shapes_of(quick=True)) < set(listed)
    timed = {(row["kind"], tuple(row["shape"])) for row in yardsticks._family()["rows"]}
    assert {each for each in timed if each[0] in module.KINDS.by_name} <= set(listed)


@pytest.mark.parametrize(
    ("module", "shape", "steps"),
    [
        (attention, (2048, 32768, 64, 128), ["mqa_logits", "mqa_logits_clean"]),
        (attention, (5, 40, 16, 32), ["mqa_logits"]),
        (attention, (3, 2, 16, 32, 100), ["paged_mqa_logits"]),
        (attention, (3, 2, 100), ["paged_metadata"]),
        (bf16, (7, 264, 256), ["bf16_dense"]),
        (bf16, (32, 256, 7168, 2048), ["bf16_contiguous", "bf16_contiguous_uneven"]),
        (einsum, (7, 3, 256, 128), ["fp8_einsum"]),
        (einsum, (128, 8192, 256), ["skip_head_mid"]),
        (hc, (137, 24, 7168, 16), ["hc_prenorm"]),
    ],
)
def test_shapes_are_of_kinds_that_have_them_else_of_the_first_with_as_many_numbers(
    module: Any, shape: tuple[int, ...], steps: list[str]
) -> None:
    assert module.KINDS.chosen([shape]) == [(name, shape) for name in steps]
    asked = Asked(shapes=",".join(map(str, shape)))
    assert module.BENCH.plan(asked)[0] == len(steps)


def test_a_number_of_splits_may_be_left_out_and_casts_are_those_that_are_listed() -> None:
    assert hc.KINDS.chosen([(13, 24, 7168)]) == [("hc_prenorm", (13, 24, 7168, 0))]
    with pytest.raises(ValueError, match="shapes: expected three or four positive integers like 32,8,4096,1024"):
        einsum.BENCH.plan(Asked(shapes="7,3"))
    with pytest.raises(ValueError, match="shapes: expected listed shapes, got '1,2'"):
        casts.KINDS.chosen([(1, 2)])


def test_a_run_has_rows_of_all_contenders_and_of_both_yardsticks(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Spread(10.0, 9.0, 11.0)
    sticks = yardsticks.rows_of(dict.fromkeys((yardsticks.COPY, yardsticks.PRODUCT), spread))
    monkeypatch.setattr(yardsticks, "measure", lambda _: sticks)
    rows: list[Row] = []
    told: list[str] = []
    of = Kinds({"fp8_einsum": Kind((), (), partial(einsum.work_of, device="cpu"))})
    of.measure([("fp8_einsum", (5, 3, 272, 136))], only=(OURS, BF16), add=rows.extend, announce=told.append)
    assert [(row.kind, row.contender) for row in rows[2:]] == [("fp8_einsum", OURS), ("fp8_einsum", BF16)]
    assert (rows[:2], told) == (sticks, ["fp8_einsum 5x3x272x136"])


def test_kernels_of_products_by_rows_are_compiled_ahead_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(yardsticks, "measure", lambda _: [])
    monkeypatch.setattr(kinds, "measure_each", lambda *_: None)
    monkeypatch.setattr(kinds, "chosen", lambda shape, output: (shape[0], output) if shape[0] > 5 else None)
    monkeypatch.setattr(tune, "compile_all", lambda configs, _: compiled.extend(configs))
    steps = [("rows_dense", shape) for shape in ((5, 8, 16), (6, 8, 16), (6, 9, 16))]
    rows.KINDS.measure(steps, add=compiled.extend, announce=print)
    assert compiled == [(6, output) for output in rows.KINDS.outputs]


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "shape"), [(einsum, (4, 3, 512, 256)), (einsum, (128, 8192, 512))])
def test_a_run_on_a_gpu(module: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for kind, _ in module.KINDS.chosen([shape]):
        work = module.KINDS.by_name[kind].make(shape)
        for row in module.KINDS.rows_of(kind, shape, work, L2Flush()):
            assert row.failed is None and row.us is not None and row.us > 0


# The parts of `bench fine_dense` and `fine_masked` that need no GPU.


OF_OURS = [fine.USUAL, *fine.SAID]


def test_weights_are_those_of_ranks_that_share_a_model_and_most_of_them_judge() -> None:
    found = products.cases_of(FINE_DENSE)
    shapes = [case.shape for case in found]
    assert shapes == list(dict.fromkeys(shapes))
    weights = {shape[1:] for shape in shapes}
    assert weights >= {(4608, 5120), (5120, 2304), (576, 5120), (5120, 288), (3072, 3072), (384, 3072), (3072, 192)}
    assert {case.shape[1:] for case in found if not case.is_judged} == fine.FITTED
    assert {shape[0] for shape in shapes} == set(fine.MS)
    assert all(n % 8 == 0 and k % 16 == 0 for n, k in weights)


def test_contenders_are_named_by_their_scales() -> None:
    of_a_and_b = list(fine.SIDES.values())
    assert of_a_and_b == [
        (PER_ROW, PER_BLOCK),
        (PER_ROW, BLOCKS_OF_32),
        (MX, BLOCKS_OF_32),
        (PER_64, BLOCKS_OF_64),
        (MX, MX),
    ]
    for name, (_, of_b) in fine.SIDES.items():
        assert name.split("_")[2] == f"{of_b.rows}x{of_b.columns}"


def test_scales_of_fine_weights_are_powers_of_two_that_fold() -> None:
    by_scales = fine.weights_of(1, 256, 512, "cpu").by_scales
    for of, (_, scales) in by_scales.items():
        exponents = scales.log2()
        assert bool((exponents == exponents.round()).all()) == (of != PER_BLOCK)
        if of != PER_BLOCK:
            blocks = exponents.view(*exponents.shape[:-1], -1, 128 // of.columns)
            assert (blocks.amax(-1) - blocks.amin(-1)).max() <= 2


def test_a_rival_that_loads_its_kernels_from_a_hub_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", SimpleNamespace())
    assert products.checked(contenders(FINE_DENSE)[fine.TRITON], 1.0)[0] is None


def test_the_rival_is_given_the_same_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(a: Any, b: Any, sa: Any, sb: Any, block_size: list[int], dtype: torch.dtype) -> torch.Tensor:
        assert a.is_contiguous() and b.is_contiguous() and block_size == [32, 32]
        x, w = (deep_gemm.cast_back_from_fp8(*each, 32) for each in ((a, sa), (b, sb)))
        return (x @ w.t()).to(dtype)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    rival = SimpleNamespace(w8a8_block_fp8_matmul_triton=multiply)
    monkeypatch.setitem(sys.modules, "transformers.integrations.finegrained_fp8", rival)
    assert contenders(FINE_DENSE)[fine.TRITON].error() < products.MAX_ERROR_BF16


def test_what_a_run_needs_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products.configurations(products.cases_of(FINE_DENSE)) == []  # without a GPU, its properties are unknown
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(products, "get_num_sms", lambda: GPUS[0].num_sms)
    found = products.configurations(products.cases_of(FINE_DENSE))
    assert len(set(found)) == len(found)
    assert {(config.sfa, config.sfb) for config in found} == set(fine.SIDES.values())
    case = products.cases_of(FINE_DENSE)[0]
    assert all(products.config_of(case, name) in found for name in OF_OURS)
    assert products.config_of(case, BF16) is None
    assert products.configurations(products.cases_of("fine_masked")) == []


# The parts of `bench fp4_dense`, `fp4_masked`, `fp4_contiguous` and `fp4_experts` that need no GPU.


# Cases


def test_judged_weights_are_those_of_experts_to_which_nothing_was_tuned() -> None:
    found = products.cases_of(FP4_DENSE)
    judged = {case.shape[1:] for case in found if case.is_judged}
    assert judged >= {(4096, 4096), (4096, 2048), (6144, 7168), (4608, 5120), (4096, 6144), (5760, 2880), (2880, 2880)}
    assert {case.shape[1:] for case in found if not case.is_judged} == fp4.FITTED
    assert not judged & fp4.FITTED
    assert {case.shape[0] for case in found} == set(fp4.MS)
    weights = [case.shape[1:] for case in found]
    assert len(set(weights)) == sum(a != b for a, b in pairwise(weights)) + 1, "cases of one weight are neighbours"


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
        """Replaces the rival's layer by a computation in torch."""

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
    assert "elements differ from the separate parts" in str(layer.check(lambda: None)[1])
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
        stage.run(bulk_read.KERNEL, None, lambda at: bulk_read.values_of(at["x"]), 3)
        assert stage.result().loads == -(-count // 1024)


def test_the_yardstick_compiles_and_refuses_what_it_cannot_read() -> None:
    assert bulk_read.KERNEL.build(bulk_read.CONFIG).cubin
    assert bulk_read.CONFIG.shared_bytes <= 227 * 1024
    assert bulk_read.read_of(17).shape == (32,)
    for source in (torch.empty(8, dtype=torch.uint8), torch.empty(8, 64)[:, :32]):
        with pytest.raises(ValueError, match="source: expected contiguous whole 16 bytes"):
            bulk_read.values_of(source)


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
    report, output = measured(tmp_path, "fp4_experts")
    rows = report.rows
    assert [row.contender for row in rows] == list(fp4_experts.CONTENDERS) * 2
    assert all(row.us == 30 and row.kind == "fp4_experts" and not row.failed for row in rows)
    assert "4x2x6x256x128" in output


def test_times_survive_a_file(tmp_path: Path) -> None:
    row = Row.of(small_case(FP4_DENSE), HUMMING, "cold", Spread(2.0, 1.0, 3.0), parts={"product": 1.5})
    header = dict.fromkeys(("kind", "date", "machine", "versions", "commit", "dirty", "source_sha256", "method"), "")
    Report(header, [row]).save(tmp_path / "r.json")
    (again,) = Report.load(tmp_path / "r.json").rows
    assert (again.shape, again.parts, again.fast_shape) == (row.shape, {"product": 1.5}, None)


# The parts of `bench few_experts` that need no GPU.


@pytest.fixture
def few_layer() -> few_experts.FewExperts:
    return few_experts.FewExperts((4, 2, 6, 256, 96), experts.weights_of(4, 256, 96, "cpu"))


def vllm_that_answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Install modules with the names in vLLM that the benchmark imports."""
    names = ["vllm", f"{few_experts.FUSED_MOE}.config", f"{few_experts.FUSED_MOE}.fused_moe"]
    found = {name: ModuleType(name) for name in names}
    found["vllm"].__spec__ = ModuleSpec("vllm", None)
    vars(found[names[1]])["fp8_w8a8_moe_quant_config"] = lambda *scales, block_shape: (scales, block_shape)
    tables: dict[tuple[Any, ...], Any] = {(4, 96, None): {1: {}}, (4, 96, "fp8_w8a8", 128, 128): None}
    vars(found[names[2]]).update(fused_experts=answer, get_moe_configs=lambda *key: tables[key])
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_the_rivals_error_is_beside_our_result(
    monkeypatch: pytest.MonkeyPatch, few_layer: few_experts.FewExperts
) -> None:
    def answer(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, *, quant_config: Any) -> Tensor:
        assert (w1, w2) == (few_layer.weights.w1[0], few_layer.weights.w2[0])
        assert quant_config == ((few_layer.weights.w1[1], few_layer.weights.w2[1]), [128, 128])
        plain = few_layer.weights.plain1, few_layer.weights.plain2
        return dict(chains_in_bf16(x, ids, weights, *plain, with_compiled=False))["bmm"]()

    vllm_that_answers(monkeypatch, answer)
    ways = {way.name: way for way in few_layer.contenders()}
    assert tuple(ways) == few_experts.CONTENDERS
    assert few_layer.check(ways[OURS].call)[1] is None
    ways[VLLM].call()
    error = ways[VLLM].error
    assert error is not None and 0 < error() < experts.MOST_ERROR
    assert some(ways[VLLM].table)() == few_experts.UNTUNED
    few_layer.out.mul_(2)
    assert 0.4 < error() < 0.6


def test_without_vllm_its_row_says_so(few_layer: few_experts.FewExperts) -> None:
    ways = {way.name: way for way in few_layer.contenders()}
    with pytest.raises(NotImplementedError, match=r"pip install vllm==0\.26\.0"):
        ways[VLLM].call()


def test_experts_takes_every_slice() -> None:
    shapes = few_experts.shapes_of()
    assert set(few_experts.shapes_of(quick=True)) < set(shapes)
    assert all(hidden % 16 == 0 == width % 16 and 96 <= width <= 512 for *_, hidden, width in shapes)


# The parts of `bench bf16_experts` that need no GPU.


def test_mixtures_in_bf16_are_near_torchs_and_take_vllms_kernels_without_scales(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (4, 2, 6, 256, 96)
    layer = bf16_experts.Bf16Experts(shape, bf16_experts.weights_of(4, 256, 96, "cpu"))
    plain = layer.weights.plain1, layer.weights.plain2

    def answer(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, *, quant_config: Any) -> Tensor:
        assert (w1 is plain[0], w2 is plain[1], quant_config) == (True, True, None)
        return dict(chains_in_bf16(x, ids, weights, *plain, with_compiled=False))["bmm"]()

    vllm_that_answers(monkeypatch, answer)
    ways = {way.name: way for way in layer.contenders()}
    assert tuple(ways) == bf16_experts.CONTENDERS
    assert layer.check(ways[OURS].call)[1] is None
    ways[VLLM].call()
    error = ways[VLLM].error
    assert error is not None and 0 < error() < bf16_experts.MOST_ERROR
    assert some(ways[VLLM].table)() == few_experts.TUNED
    assert "wrong: relative error" in str(layer.check(layer.out.zero_)[1])
    used = len(set(layer.topk_ids.flatten().tolist()))
    assert layer.work.bytes == used * 3 * 96 * 256 * 2 + 2 * 6 * 256 * 2
    assert set(bf16_experts.shapes_of(quick=True)) < set(bf16_experts.shapes_of())
