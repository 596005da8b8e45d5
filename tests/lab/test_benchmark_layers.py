"""The parts of `bench casts`, `linear` and `experts` that need no GPU: operands on the CPU, made-up kernel events."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import dequantize, raising, some
from test_benchmark import FILL, NoFlush, invoke, measured, recording
from test_docs import script

import deep_gemm
from deep_gemm.core.sources import cuda_sources
from lab.bench import benches, casts, command, experts, kinds, layers, linear, machine, plot_layers, timing, training
from lab.bench.bench import planned
from lab.bench.contenders import BF16, OURS
from lab.bench.distributed import COMBINE, DISPATCH, GROUP, GROUP_FIXED, LAYER, LAYER_FP4, MEGA
from lab.bench.distributed_training import routes_of_all
from lab.bench.layers import ALONE, COPY, EAGER, Layer, Work
from lab.bench.report import Report, Row
from lab.bench.timing import KernelEvent, Kernels, Spread
from lab.configs import reachable_dense as reachable
from lab.configs import reachable_grouped, reachable_k_grouped

SMALL_EXPERTS = (4, 2, 6, 256, 128)
OURS_OF_EXPERTS = ("route_rows", "cast_rows", "fp8_gemm_dense", "silu_cast", "fp8_gemm_dense", "gather_weighted")

# Kernels of one call that overlap


def test_kernels_of_a_call_may_start_in_another_order() -> None:
    events = [KernelEvent(FILL, 0, 150), KernelEvent("cast", 151, 4), KernelEvent("product", 152, 9)]
    turned = [KernelEvent(FILL, 200, 150), KernelEvent("product", 351, 9), KernelEvent("cast", 352, 4)]
    found = timing.kernels_of_calls([*events, *turned], FILL, ["x", "x"])
    assert [timing.span_us(kernels) for kernels in found["x"]] == [10, 9]
    with pytest.raises(timing.PairingError, match="same kernels"):
        timing.kernels_of_calls([*events, *turned[:2]], FILL, ["x", "x"])


def test_what_lies_between_kernels_counts_and_what_overlaps_counts_once() -> None:
    kernels = (KernelEvent("cast", 10, 4), KernelEvent("product", 12, 10), KernelEvent("last", 30, 1))
    assert timing.span_us(kernels) == 21
    assert timing.busy_us(kernels) == 13


def test_parts_add_up_to_the_span() -> None:
    starts = (0, 2, 3, 20, 25, 31)
    kernels = tuple(KernelEvent(name, start, 6) for name, start in zip(OURS_OF_EXPERTS, starts, strict=True))
    parts = layers.part_times([kernels], layers.parts_of_experts)
    assert parts == {"routing": 6, "cast": 2, "product 1": 1, "activation": 17, "product 2": 5, "weighted gather": 6}
    assert sum(parts.values()) == timing.span_us(kernels)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["cast", "fp8_gemm", "fp8_gemm"], ["cast", "product 1", "product 2"]),  # an epilogue activates
        (
            ["gemm", "tail_gemm", "silu", "gemm", "sum"],
            [*["product 1"] * 2, "activation", "product 2", "weighted gather"],
        ),
        (
            ["a", "route_rows", "gemm", "b", "c", "gemm"],
            ["cast", "routing", "product 1", *["activation"] * 2, "product 2"],
        ),
        (["fp8_gemm"], None),
        ([], None),
    ],
)
def test_parts_of_experts_are_told_by_products(names: list[str], parts: list[str] | None) -> None:
    assert layers.parts_of_experts(names) == parts


def test_names_of_kernels_tell_products_and_routing() -> None:
    kernels = cuda_sources()
    names = {found for text in kernels.values() for found in re.findall(r"^KERNEL\(.*?\) (\w+)\(", text, re.MULTILINE)}
    names |= {config.kernel_name for config in (*reachable(), *reachable_grouped(), *reachable_k_grouped())}
    products = {name for name in names if layers.is_product(name)}
    assert products >= {"fp8_gemm_dense", "fp8_gemm_decode", "fp8_gemm_m_grouped_masked", "fp8_wgrad_gemm_k_grouped"}
    assert names - products >= {"route_rows", "cast_rows", "gather_weighted"}


def test_a_call_without_a_product_has_no_parts() -> None:
    assert layers.part_times([(KernelEvent("one launch", 0, 3),)], layers.parts_of_linear) is None


# Measured cases


def test_shapes_are_those_that_figures_are_judged_by() -> None:
    kinds = casts.KINDS.shapes_of()
    for kind in ("cast_1x128", "silu_cast"):
        shapes = {shape for each, shape in kinds if each == kind}
        assert shapes >= {(m, 7168) for m in (1, 16, 64, 256, 1024, 4096, 8192)} | {(8192, 2048), (16384, 16384)}
    assert {kind for kind, _ in casts.KINDS.shapes_of(quick=True)} == {kind for kind, _ in kinds}
    assert {m for m, _, _ in linear.shapes_of()} == {1, 16, 64, 4096}
    assert len(linear.shapes_of()) == 28
    assert len(experts.shapes_of()) == 3 * 7 * 2
    assert {(shape[0], shape[2]) for shape in experts.shapes_of()} == {
        (count, tokens) for count in (32, 128, 256) for tokens in (1, 16, 64, 256, 1024, 4096, 8192)
    }
    assert set(experts.shapes_of(quick=True)) < set(experts.shapes_of())
    assert set(linear.shapes_of(quick=True)) < set(linear.shapes_of())


def test_masked_casts_count_rows_in_use() -> None:
    m, _ = casts.MASKED[0]
    assert m == sum(casts.COUNTS)
    assert all(64 <= count <= 192 for count in casts.COUNTS)
    cast = casts.cast_of("silu_cast_masked", (m, 128), "cpu")
    assert cast.bytes == m * 128 * 5 + m * 4
    assert int(some(cast.in_use).sum()) == m


# Contenders, on the CPU


@pytest.mark.parametrize("kind", casts.SHAPES)
def test_casts_in_torch_are_ours(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "COMPARED_ROWS", 50)
    of_groups = 2 * casts.GROUP_ROWS, 144
    others = {"silu_cast_masked": (sum(casts.COUNTS), 128), "cast_groups": of_groups, "silu_gradient": of_groups}
    cast = casts.cast_of(kind, others.get(kind, (160, 264)), "cpu")
    assert casts.difference(cast) is None
    values = casts._flat(cast.ours())[0]
    place = {1: (130,), 2: (130, 0), 3: (0, 0, 0)}[values.dim()]

    def wrong() -> Any:
        outputs = [x.clone() for x in casts._flat(cast.ours())]
        outputs[0].view(torch.uint8 if outputs[0].element_size() == 1 else outputs[0].dtype)[place] += 5
        return outputs

    assert "output 0 differs" in (casts.difference(cast._replace(ours=wrong)) or "")


def test_rows_that_are_not_in_use_may_differ() -> None:
    cast = casts.cast_of("silu_cast_masked", (sum(casts.COUNTS), 128), "cpu")
    values, scales = cast.ours()
    scales[0, casts.COUNTS[0] :] = 7
    assert casts.difference(cast._replace(ours=lambda: (values, scales))) is None


@pytest.fixture(scope="module")
def weights() -> experts.Weights:
    return experts.weights_of(4, 256, 128, "cpu")


def test_weights_are_the_same_numbers_in_fp8_and_bf16(weights: experts.Weights) -> None:
    for (values, scales), plain in ((weights.w1, weights.plain1), (weights.w2, weights.plain2)):
        assert bool(values.float().isfinite().all())
        assert torch.equal(dequantize(values, scales, 128).bfloat16(), plain)
        assert 0.5 < float(plain.float().std()) * plain.shape[2] ** 0.5 < 2


def test_all_ways_through_experts_give_one_result(weights: experts.Weights) -> None:
    layer = experts.Experts(SMALL_EXPERTS, weights)
    right = some(deep_gemm.experts(layer.x, layer.topk_ids, layer.topk_weights, weights.w1, weights.w2))
    chains = []
    for way in layer.contenders():
        out = way.call()
        if way.name == BF16:
            chains.append(way.chain)
            assert linear.relative_error(out, right) < experts.MOST_ERROR, way.chain
    assert chains == ["index_add", "bmm", "sum"]
    assert torch.equal(layer.out, right)
    assert linear.relative_error(layer.out_of_eager, right) < 4e-3
    assert layer.judge(right)[1] is None


def test_wrong_layers_are_found_out(weights: experts.Weights) -> None:
    layer = experts.Experts(SMALL_EXPERTS, weights)
    assert "elements differ from the separate parts" in str(layer.check(lambda: None)[1])
    of_linear = linear.Linear(4, 128, 256, "cpu")

    def nearly() -> None:
        deep_gemm.linear(of_linear.x, of_linear.w, out=of_linear.out)
        of_linear.out[3, 5] *= 1.01

    error, wrong = of_linear.check(nearly)
    assert error < linear.MOST_ERROR
    assert wrong == "wrong: 1 elements differ from the cast and the product"


def test_all_ways_through_a_linear_layer_run() -> None:
    layer = linear.Linear(4, 128, 256, "cpu")
    ways = list(layer.contenders())
    assert [way.name for way in ways] == [OURS, ALONE, BF16, BF16, COPY, EAGER]
    for way in ways:
        way.call()
    assert torch.equal(layer.out, layer.d)
    assert layer.work.cast_bytes == 4 * 256 * 3 + 4 * 2 * 4


# Rows


WORK = Work("linear", (1, 2, 3), 10, 20)


def pretend(monkeypatch: pytest.MonkeyPatch, kernels: Mapping[str, list[tuple[str, float]]]) -> None:
    """Make graphs call at once, and make up the kernel events of each contender."""

    def recorded(
        calls: Mapping[str, Callable[[], Any]],
        flush: object,
        repeats: int,
        while_busy: Callable[[], None] = lambda: None,
    ) -> dict[str, list[Kernels]]:
        while_busy()
        for call in calls.values():
            call()
        if all(name.isdigit() for name in calls):  # digits name the steps of a chain
            return {name: [(KernelEvent("torch", 0, 1),)] for name in calls}
        order = [name for name in calls for _ in range(repeats)]
        events = recording(*[kernels.get(name, [("other", 9.0)]) for name in order])
        return timing.kernels_of_calls(events, FILL, order)

    monkeypatch.setattr(layers, "captured", lambda call: (call(), call)[1])
    monkeypatch.setattr(layers, "recorded", recorded)
    for module in (linear, experts, kinds):
        monkeypatch.setattr(module, "L2Flush", NoFlush)
    monkeypatch.setattr(command, "has_gpu", lambda: True)


def test_of_several_chains_the_fastest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"bf16 a": [("x", 9.0)], "bf16 b": [("y", 3.0), ("z", 3.0)]})
    broken = raising(RuntimeError("no such kernel"))
    ways = [Layer(BF16, lambda: 1, chain="a"), Layer(BF16, lambda: 1, chain="b"), Layer(BF16, broken, chain="c")]
    (row,) = layers.rows_of(WORK, ways, lambda call: (0.0, None), NoFlush())  # type: ignore[arg-type]
    assert (row.us, row.config, row.kernels) == (7, "b", ("y", "z"))
    (row,) = layers.rows_of(WORK, ways[2:], lambda call: (0.0, None), NoFlush())  # type: ignore[arg-type]
    assert (row.us, row.failed) == (None, "RuntimeError: no such kernel")


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    rows = layers.rows_of(WORK, [Layer(OURS, lambda: 1)], lambda call: (0.5, "wrong: it is"), NoFlush())  # type: ignore[arg-type]
    assert [(row.us, row.error, row.failed) for row in rows] == [(None, 0.5, "wrong: it is")]


def test_a_recording_that_is_torn_leaves_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {})
    monkeypatch.setattr(layers, "recorded", raising(timing.PairingError("3 fills for 4 calls")))
    rows = layers.rows_of(WORK, [Layer(ALONE, lambda: 1)], lambda call: (0.0, None), NoFlush())  # type: ignore[arg-type]
    assert [(row.contender, row.failed) for row in rows] == [(ALONE, "PairingError: 3 fills for 4 calls")]


def test_steps_of_a_chain_tell_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {EAGER: [("torch", 5.0), ("torch", 7.0)]})
    steps = (("cast", lambda: 1), ("product", lambda: 2))
    (row,) = layers.rows_of(WORK, [Layer(EAGER, lambda: 1, steps=steps)], lambda call: (0.0, None), NoFlush())  # type: ignore[arg-type]
    assert row.parts == {"cast": 5, "product": 8}  # includes the wait of 1 us between them
    assert row.us == 13


# Runs


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the layers small, and put them on the CPU."""
    pretend(
        monkeypatch,
        {
            OURS: [(name, 4.0) for name in OURS_OF_EXPERTS],
            ALONE: [("fp8_gemm_dense", 4.0)] * 2,
            EAGER: [("torch", 4.0)] * 6,
            "bf16 bmm": [("x", 8.0)],
        },
    )
    made = partial(experts.measure, experts.Experts, lambda *_: experts.weights_of(4, 256, 128, "cpu"))
    monkeypatch.setattr(linear, "Linear", lambda m, n, k, _, make=linear.Linear: make(m, n, k, "cpu"))
    two: dict[str, tuple[Callable[..., None], list[tuple[int, ...]]]] = {
        "linear": (linear.measure, [(1, 128, 256), (5, 128, 256)]),
        "experts": (made, [SMALL_EXPERTS, (4, 2, 1, 256, 128)]),
    }
    for name, (measure, shapes) in two.items():
        plan = planned(lambda quick, shapes=shapes: shapes, measure, (len(shapes[0]),), ",".join("12345"))
        monkeypatch.setitem(benches.BENCHES, name, replace(benches.BENCHES[name], plan=plan))
    of_casts = [casts._kind(kind, [(4, 256)], "cpu") for kind in ("cast_1x128", "cast_both")]
    chosen = replace(casts.KINDS, by_name=dict(zip(("cast_1x128", "cast_both"), of_casts, strict=True)))
    monkeypatch.setitem(benches.BENCHES, "casts", replace(casts.BENCH, plan=chosen.plan("1,2")))
    monkeypatch.setattr(casts.Compiler, "__call__", lambda self, call: call)
    monkeypatch.setattr(
        kinds, "cold", lambda calls, *_: {name: (Spread(9.0, 8.0, 10.0), ("kernel" * 50,)) for name in calls}
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "contenders"),
    [("casts", casts.CONTENDERS), ("linear", linear.CONTENDERS), ("experts", experts.CONTENDERS)],
)
def test_a_run_measures_keeps_and_shows(kind: str, contenders: tuple[str, ...], tmp_path: Path) -> None:
    report, output = measured(tmp_path, kind, "--commit", "abc")
    assert {row.contender for row in report.rows} == set(contenders)
    assert len(report.rows) == 2 * len(contenders)
    assert all(row.us and row.kernels and not row.failed for row in report.rows)
    assert all(row.bytes for row in report.rows)
    assert f"{kind}: " in report.header["method"]
    assert f"{kind} on " in output
    assert " 2/2  " in output  # a line for each step if the output is no terminal
    if kind == "experts":
        ours = next(row for row in report.rows if row.contender == OURS)
        assert list(ours.parts or {}) == ["routing", "cast", "product 1", "activation", "product 2", "weighted gather"]
        assert {row.config for row in report.rows if row.contender == BF16} == {"bmm"}
    if kind != "casts":
        code, output = invoke("plot", str(tmp_path / "result.json"), str(tmp_path / "picture.png"))
        assert code == 0, output


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("kind", "shape"), [("casts", (4, 256)), ("linear", (3, 136, 256)), ("experts", (4, 3, 5, 256, 128))]
)
def test_shapes_may_be_chosen_and_rivals_left_out(kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    report, _ = measured(tmp_path, kind, "--only", "deep_gemm, torch", "--shapes", ",".join(map(str, shape)))
    assert {row.contender for row in report.rows} == {OURS, EAGER}
    assert {row.shape for row in report.rows} == {shape}


@pytest.mark.usefixtures("small")
def test_a_run_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 1000, 70))
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    report, output = measured(tmp_path, "linear", "--minutes", "2", "--only", "product_alone", code=1)
    assert "stopped: 1 of 2 steps were left after 2 minutes" in output
    assert len(report.rows) == 1


@pytest.mark.usefixtures("small")
def test_a_layer_that_cannot_be_made_leaves_a_row(tmp_path: Path) -> None:
    shapes = "4,5,1,256,128;4,2,1,256,128"  # five of four experts
    report, _ = measured(tmp_path, "experts", "--shapes", shapes, code=1)
    assert [(row.contender, row.us) for row in report.rows if row.shape[1] == 5] == [(OURS, None)]
    assert len(report.rows) == 1 + len(experts.CONTENDERS)


@pytest.mark.usefixtures("small")
def test_a_cast_that_fails_leaves_a_row_and_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deep_gemm.casts.fp8.cast_both_to_fp8", raising(RuntimeError("launch failed")))
    report, output = measured(tmp_path, "casts", code=1)
    assert "no time for deep_gemm at 4x256: RuntimeError: launch failed" in output
    rows = [row for row in report.rows if row.kind == "cast_both"]
    assert {row.contender for row in rows if row.us} == {COPY, casts.COMPILED, EAGER}


def test_compiling_ends_when_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, dynamic: call)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    seconds = iter((0, 100, 200, 300))
    monkeypatch.setattr(casts, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    compiler = casts.Compiler()
    for _ in range(2):
        compiler(lambda: 1)
    with pytest.raises(TimeoutError, match="compiling other casts took 200 s"):
        compiler(lambda: 1)


# Tables and plots of made-up rows


def made_up(kind: str) -> Report:
    """Make up layers that take 60 us, 100 with casts by torch, 90 in BF16; their products alone take 50 us."""
    report = Report(machine.header(kind, "made up", commit="abc"))
    report.header["machine"]["gpu"] = "NVIDIA H200"
    shapes: list[tuple[int, ...]] = list(linear.shapes_of()) if kind == "linear" else list(experts.shapes_of())
    parts: tuple[str, ...] = ("cast", "product")
    if kind == "experts":
        parts = ("routing", "cast", "product 1", "activation", "product 2", "weighted gather")
    for shape in shapes:
        row = Row(kind, shape, OURS, "cold", 60.0, 59.0, 61.0, parts=dict.fromkeys(parts, 60 / len(parts)))
        eager = replace(row, contender=EAGER, us=100.0, parts=dict.fromkeys(parts, 100 / len(parts)))
        others = [replace(row, contender=name, us=us, parts=None) for name, us in ((ALONE, 50.0), (BF16, 90.0))]
        report.rows += [row, *others, eager]
        if kind == "linear":
            report.rows.append(replace(row, contender=COPY, us=10.0, parts=None))
    return report


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_plots_show_parts_before_and_after(kind: str, tmp_path: Path) -> None:
    report = made_up(kind)
    report.save(tmp_path / "result.json")
    again = Report.load(tmp_path / "result.json")
    panels = plot_layers.panels_of(again)
    assert len(panels) == (7 if kind == "linear" else 6)
    for pairs in panels.values():
        assert [plot_layers.tokens_of(pair.shape) for pair in pairs] == sorted(
            {plot_layers.tokens_of(row.shape) for row in report.rows}
        )
        for before, after in (pair.rows for pair in pairs):
            assert after is not None
            assert (some(before).us, after.us) == (100, 60)
            assert sum((after.parts or {}).values()) == pytest.approx(60)
    code, output = invoke("plot", str(tmp_path / "result.json"), str(tmp_path / "a" / "plot.png"))
    assert code == 0, output
    assert (tmp_path / "a" / "plot.png").stat().st_size > 20_000


def test_plots_do_without_what_failed_and_say_if_there_is_nothing(tmp_path: Path) -> None:
    report = made_up("experts")
    report.rows = [replace(row, parts=None) if row.shape[2] == 1 else row for row in report.rows]
    report.rows = [row for row in report.rows if row.contender != EAGER or row.shape[2] != 16]
    pairs = plot_layers.panels_of(report)["256 experts, top 8, 7168 x 2048"]
    assert [plot_layers.tokens_of(pair.shape) for pair in pairs] == [16, 64, 256, 1024, 4096, 8192]
    command.plot_report(report, tmp_path / "some.svg")
    report.rows = []
    with pytest.raises(command.UsageError, match="a plot needs times of parts, and this run of bench experts has none"):
        command.plot_report(report, tmp_path / "none.png")


# On a GPU


@pytest.mark.gpu
def test_layers_on_the_gpu_are_right_and_have_parts() -> None:
    flush = timing.L2Flush()
    of_linear = linear.Linear(64, 512, 1024, "cuda")
    for row in layers.rows_of(of_linear.work, of_linear.contenders(), of_linear.check, flush):
        assert row.failed is None, row
        assert row.parts or row.contender not in (OURS, EAGER)
    layer = experts.Experts((8, 2, 100, 512, 256), experts.weights_of(8, 512, 256, "cuda"))
    for row in layers.rows_of(layer.work, layer.contenders(), layer.check, flush):
        assert row.failed is None, row
        assert row.parts or row.contender not in (OURS, EAGER), row


@pytest.mark.gpu
def test_a_replayed_graph_is_timed_as_its_kernels_are() -> None:
    flush = timing.L2Flush()
    x = torch.randn(1 << 22, device="cuda")
    call = lambda: (x + 1).mul_(2)  # noqa: E731
    found = timing.recorded({"eager": call, "graph": layers.captured(call)}, flush, 5)
    eager, graph = (found[name][0] for name in ("eager", "graph"))
    assert timing.names_of(eager) == timing.names_of(graph)
    assert timing.busy_us(graph) == pytest.approx(timing.busy_us(eager), rel=0.3)


# The parts of `bench training` that need no GPU: layers are on the CPU, and times are made up.


MIXTURE, MATRIX = (4, 2, 24, 64, 32), (24, 32, 64)
LINE = [KernelEvent("product", 0, 1500), KernelEvent("sum", 1510, 4)]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call each function once without timing it."""

    def called(call: Any, repeats: int = 10) -> Spread:
        call()
        return Spread(2000.0, 1000.0, 3000.0)

    monkeypatch.setattr(training, "warm", called)
    monkeypatch.setattr(training, "peak_bytes", lambda layer: 1 << 31)
    monkeypatch.setattr(training, "profiled", lambda call: LINE)
    monkeypatch.setattr(training, "SETTLE_SECONDS", 0)


@pytest.mark.parametrize("shape", [MIXTURE, MATRIX])
def test_rows_of_one_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layers = training.layers_of(shape, "cpu")
    rows = training.rows_of(shape, layers, ())
    by_rows = [training.ROWS] if shape == MATRIX else []
    assert [(row.contender, row.mode) for row in rows] == [
        (name, mode) for name in (OURS, training.KEPT, *by_rows, BF16) for mode in (training.STEP, training.FORWARD)
    ]
    step, forward, *_ = rows
    assert (step.failed, step.kind, step.peak_bytes) == (None, training.kind_of(shape), 1 << 31)
    assert step.operations == 3 * (forward.operations or 0) > 0
    assert step.parts == {"1 product": 1500.0, "2 wait": 10.0, "3 sum": 4.0}
    (alone, _) = training.rows_of(shape, layers, (BF16,))
    assert (alone.contender, alone.error) == (BF16, None)
    (wrong, _, *_) = training.rows_of(shape, {**layers, OURS: layers[OURS]._replace(grad=-layers[OURS].grad)}, ())
    assert wrong.failed is not None and wrong.failed.startswith("wrong: relative error 2")


def test_a_contender_that_fails_leaves_the_others_their_times() -> None:
    layers = training.layers_of(MATRIX, "cpu")
    broken = raising(RuntimeError("no kernel of this name"))
    layers[training.ROWS] = layers[training.ROWS]._replace(forward=broken)
    rows = training.rows_of(MATRIX, layers, (training.ROWS, BF16))
    assert [(row.contender, row.failed, row.us) for row in rows] == [
        (training.ROWS, "RuntimeError: no kernel of this name", None),
        *[(BF16, None, 2000.0)] * 2,
    ]


def test_all_ways_learn_a_regression_and_end_near_each_other() -> None:
    rows = training.learned((64, 32, 48, 40), "cpu")
    losses = {row.contender: row.error for row in rows}
    assert list(losses) == [OURS, training.ROWS, BF16]
    assert len({*losses.values()}) == 3
    assert all(error is not None and error == pytest.approx(losses[BF16], rel=0.02) for error in losses.values())
    assert all(error is not None and error < 0.95 for error in losses.values())
    assert [row.contender for row in training.learned((64, 32, 48, 2), "cpu", (BF16,))] == [BF16]


def test_an_error_is_that_of_the_whole_whatever_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    got, expected = (torch.randn(5, 7, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    monkeypatch.setattr(linear, "MOST_AT_ONCE", 8)
    of_whole = float(torch.linalg.norm(got - expected) / torch.linalg.norm(expected))
    assert linear.relative_error(got, expected) == pytest.approx(of_whole)
    monkeypatch.setattr(training, "MOST_COMPARED", 56)
    assert torch.equal(training.some_of(got), got[::3])
    assert torch.equal(training.some_of(got[:2]), got[:2])
    expected[3, 3] = torch.nan
    assert not linear.relative_error(got, expected) <= training.MOST_ERROR


def test_a_gradient_of_nan_is_an_error() -> None:
    layers = training.layers_of(MATRIX, "cpu")
    layers[OURS].leaves[1].register_hook(lambda grad: torch.full_like(grad, torch.nan))  # type: ignore[no-untyped-call]
    assert not training.error_of(layers) <= training.MOST_ERROR


def test_work_is_that_of_three_products_of_each_weight() -> None:
    assert training.work_of(MATRIX) == (2 * 24 * 32 * 64, 2 * (3 * 32 * 64 + 2 * 24 * 96))
    assert training.work_of(MIXTURE) == (2 * 48 * 3 * 64 * 32, 2 * (3 * 4 * 3 * 64 * 32 + 4 * 24 * 64))


def test_what_runs_beside_another_kernel_counts_once_and_2_us_are_no_wait() -> None:
    events = [KernelEvent("a", 0, 10), KernelEvent("b", 5, 10), KernelEvent("c", 6, 2), KernelEvent("d", 17, 1)]
    assert training.parts_of(events) == {"1 a": 10, "2 b": 5, "3 c": 0, "4 d": 1}  # launches follow each other


def test_few_shapes_are_of_both_kinds() -> None:
    assert {training.kind_of(shape) for shape in training.shapes_of(quick=True)} == {training.EXPERTS, training.LINEAR}
    assert set(training.shapes_of(quick=True)) < set(training.shapes_of())


# `bench distributed`: two processes over Gloo on this machine, and refused arguments.


SHAPE = (4, 2, 6, 256, 128, 1)
STEP = SHAPE[:5]


@pytest.fixture
def no_gpu_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the processes that it starts see no GPU either
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_two_processes_measure_the_layer_and_its_ways(
    no_gpu_of_ranks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.json"
    assert command.run("distributed", shapes="4,2,6,256,128,1; 4,2,6,256,128", processes=2, out=path, commit="abc")
    rows = Report.load(path).rows
    assert {(row.kind, row.contender) for row in rows} == {
        *((kind, name) for kind in (LAYER, LAYER_FP4) for name in (GROUP, GROUP_FIXED, MEGA, ALONE)),
        *((kind, name) for kind in (DISPATCH, COMBINE) for name in (GROUP, GROUP_FIXED)),
        *(("ep_step", name) for name in (GROUP, ALONE)),
    }
    for row in rows:
        assert row.shape == (STEP if row.kind == "ep_step" else SHAPE)
        assert (row.config, row.failed) == ("2 processes", None)
        assert row.us_min and row.us and row.us_max and 0 < row.us_min <= row.us <= row.us_max
    assert "ep_combine" in capsys.readouterr().out


def test_routes_are_different_experts_and_skew_prefers_few() -> None:
    even, skewed = (routes_of_all(64, 4, 500, skew, processes=2) for skew in (0, 1))
    for routes in (even, skewed):
        assert routes.shape == (1000, 4)
        assert all(len(set(row)) == 4 for row in routes.tolist())
    most = [int(torch.bincount(routes.flatten(), minlength=64).max()) for routes in (even, skewed)]
    assert most[0] < 100 and most[1] > 500  # mean 62.5; a third of 4000 draws name expert 0, at most 1000 get it
    assert torch.equal(even, routes_of_all(64, 4, 500, 0, processes=2))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "dense", "processes": 2}, "--processes is for bench distributed"),
        ({"kind": "distributed"}, "found none; --quick and --shapes run anywhere"),
        ({"kind": "distributed", "quick": True, "processes": 0}, "processes: expected at least 1, got 0"),
        ({"kind": "distributed", "shapes": "8,2,8"}, "five or six integers (the last may be 0) like 256,6,"),
        ({"kind": "distributed", "shapes": "5,2,6,256,128,0"}, "expected experts for 2 processes to share"),
        ({"kind": "distributed", "quick": True, "only": "torch"}, "only: expected some of nccl, nccl_fixed"),
    ],
)
def test_what_cannot_be_measured_is_refused(no_gpu_of_ranks: None, arguments: dict[str, object], says: str) -> None:
    with pytest.raises(command.UsageError, match=re.escape(says)):
        command.run(**arguments)  # type: ignore[arg-type]


def test_the_time_line_of_a_call_is_drawn_from_its_record(tmp_path: Path) -> None:
    timeline = script("draw_timeline")
    seen = [("fill", 5.0, 1.0), ("ncclDevKernel_AllReduce", 6.0, 1.0), ("post_rows", 8.0, 2.0), ("fp8_gemm", 10.0, 3.0)]
    assert timeline.behind_all_reduce(seen) == [("post_rows", 0.0, 2.0), ("fp8_gemm", 2.0, 3.0)]
    timeline.draw(tmp_path / "line.png")
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
