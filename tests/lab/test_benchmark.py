"""Parts of the benchmark that need no GPU: cases, pairing, statistics, result files, tables, plots, command line."""

from __future__ import annotations

import io
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from helpers import raising, some
from rich.console import Console
from typer.testing import CliRunner

import deep_gemm
import lab.bench.report as report_module
from deep_gemm.core import gpu as gpus
from deep_gemm.gemm.choose.fp8 import menu_of, select
from deep_gemm.gemm.kinds.output import Output, Sizes
from lab.__main__ import app, bench
from lab.bench import benches, cases, command, compile_times, contenders, host, machine, peers, products, timing
from lab.bench.cases import ANCHOR, ANCHOR_SHORT_K, Case, all_cases, cases_of, cold_copy_us
from lab.bench.compare import comparisons, summaries
from lab.bench.contenders import BF16, BLOCKWISE, FAST, OURS, Contender, contenders_of
from lab.bench.report import Report, Row, geometric_mean
from lab.bench.timing import KernelEvent, PairingError, Spread, busy_us, kernels_of_calls, names_of, rotated

FILL = "fill"


# Cases


def test_the_package_does_not_hide_the_public_function_bench() -> None:
    assert callable(deep_gemm.bench)


def test_cases_are_those_of_the_peers_and_some_more() -> None:
    counts = Counter(case.kind for case in all_cases())
    assert counts == {
        "dense": 67 + 7 + len(cases.ODD_SHAPES),
        "dense_1d1d": 4,
        "contiguous": 6,
        "contiguous_uneven": 16,
        "masked": 12,
        "k_grouped": 6,
    }
    assert len({(case.kind, case.shape) for case in all_cases()}) == len(all_cases())


# Times of peers

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("gpu", [H200, H100])
def test_peers_were_measured_beside_us_and_say_how(gpu: str) -> None:
    session = peers.sessions()[gpu]
    assert session.header["date"].startswith("2026-")
    assert re.fullmatch(r"[0-9a-f]{7,}", session.header["commit"])
    assert "torch" in session.header["machine"]["software"]
    assert "one process" in session.header["method"]
    assert "512 MB fill" in session.header["method"]
    for contender in (OURS, peers.DEEPGEMM):
        measured = {(row.kind, row.shape) for row in session.rows if row.contender == contender}
        assert measured == {(case.kind, case.shape) for case in all_cases()} - {
            ("dense", shape) for shape in cases.UNKNOWN_TO_PEERS + cases.ODD_SHAPES
        }
    fast = {row.shape for row in session.rows if (row.contender, row.kind) == (FAST, "dense")}
    assert fast == {row.shape for row in session.rows if row.kind == "dense"}
    assert peers.host_times(gpu)["dense m=4096"].keys() == {OURS, peers.DEEPGEMM, "torch._scaled_mm"}


def test_ratios_of_deepgemm_are_those_of_the_gpu_that_was_measured() -> None:
    assert peers.deepgemm_ratio_to_fast(H200, "dense", (1, 576, 7168)) == pytest.approx(10.017 / 7.36)
    assert peers.deepgemm_ratio_to_fast(H100, "dense", (128, 32768, 512)) == pytest.approx(13.12 / 13.041)
    for gpu, anchor_us, us in ((H200, 86.577, 47.008), (H100, 88.754, 66.209)):
        found = peers.deepgemm_ratio_to_fast(gpu, "contiguous_uneven", (8, 512, 7168, 2048))
        assert found == pytest.approx(us / anchor_us)
    assert peers.deepgemm_ratio_to_fast(H200, "dense", cases.ODD_SHAPES[0]) is None
    for other in ("NVIDIA H100 PCIe", "NVIDIA H20", None):
        assert peers.deepgemm_ratio_to_fast(other, "dense", (1, 576, 7168)) is None


def test_a_rival_that_was_measured_in_the_run_is_not_estimated() -> None:
    compared = {(each.row.kind, each.row.shape): each for each in comparisons(peers.sessions()[H200])}
    assert compared["dense", (512, 2112, 7168)].to_deepgemm == pytest.approx(16.288 / 15.265)
    assert compared["dense", (512, 2112, 7168)].to_fast == pytest.approx(16.288 / 14.88)
    assert compared["masked", (2, 512, 4096, 7168)].to_deepgemm == pytest.approx(56.848 / 68.064)


def test_sizes_of_groups_fit_their_shape() -> None:
    for case in all_cases():
        assert len(case.sizes) == (0 if case.kind.startswith("dense") else case.shape[0]), case
        if case.kind == "contiguous_uneven":
            assert sum(case.sizes) == case.shape[1], case
        if case.kind == "masked":
            assert all(0.69 * case.shape[1] <= rows <= min(1.3 * case.shape[1], case.max_m) for rows in case.sizes)


def test_every_dense_shape_is_one_that_the_products_take_and_odd_ones_are_odd_in_every_dimension() -> None:
    for case in all_cases():
        if case.kind.startswith("dense"):
            _, n, k = case.shape
            assert (n % 8, k % 16) == (0, 0), case
    assert all(any(size % 128 for size in sizes) for sizes in zip(*cases.ODD_SHAPES, strict=True))


def test_quick_cases_are_few_and_exist() -> None:
    assert 10 <= len(cases_of("dense", quick=True)) <= 14
    for kind, shapes in cases.QUICK.items():
        assert {(kind, shape) for shape in shapes} <= {(case.kind, case.shape) for case in all_cases()}


def test_groups_come_with_the_dense_shapes_that_they_are_compared_to() -> None:
    assert [case.shape for case in cases_of("grouped", quick=True)[:2]] == [ANCHOR, ANCHOR_SHORT_K]
    alone = cases_of("grouped", shapes=[(32, 20, 7168, 2048)])
    assert [(case.kind, case.shape) for case in alone] == [("dense", ANCHOR_SHORT_K), ("masked", (32, 20, 7168, 2048))]


def test_asked_for_shapes_may_be_new_where_they_are_dense() -> None:
    known, new = cases_of("dense", shapes=[(64, 2112, 7168), (5, 8, 16)])
    assert known in all_cases()
    assert new == Case("dense", (5, 8, 16))
    assert new not in all_cases()
    with pytest.raises(ValueError, match="none of the grouped cases: contiguous 4,8192,4096,7168"):
        cases_of("grouped", shapes=[(1, 2, 3, 4)])


@pytest.mark.parametrize("text", ["64,2112", "a,b,c", "", ";", "0,8,16", "1;2;3"])
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="shapes: expected"):
        cases.parse_shapes(text)


# Floors


@pytest.mark.parametrize(
    ("mib", "us"), [(0.0, 2.0), (1, 2.4), (2.5, 3.0), (30, 12.1), (45, 16.75), (500, 124.6), (1000, 249.2)]
)
def test_cold_copy_times_lie_on_the_measured_line(mib: float, us: float) -> None:
    assert cold_copy_us(mib * (1 << 20)) == pytest.approx(us)


def test_cold_copy_times_grow() -> None:
    times = [cold_copy_us(mib * (1 << 20)) for mib in range(0, 1200, 7)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("shape", "floor_us"),
    [
        ((8, 512, 4096, 7168), 63.2),
        ((8, 8192, 4096, 7168), 293.3),
        ((32, 64, 4096, 7168), 146.8),
        ((256, 2048, 7168, 2048), 820.9),
    ],
)
def test_floors_of_groups_count_weights_of_groups_that_have_rows(shape: tuple[int, ...], floor_us: float) -> None:
    (case,) = (case for case in all_cases() if (case.kind, case.shape) == ("contiguous_uneven", shape))
    assert case.floor_us == pytest.approx(floor_us, rel=2e-3)  # this floor counts scales, the older floor did not


def test_bytes_of_a_dense_product_and_of_a_weight_gradient() -> None:
    assert Case("dense", (64, 256, 256)).bytes == 64 * 256 + 64 * 2 * 4 + 256 * 256 + 2 * 2 * 4 + 64 * 256 * 2
    gradient = Case("dense_1d1d", (64, 256, 256))
    assert gradient.bytes == 64 * 256 + 64 * 2 * 4 + 256 * 256 + 256 * 2 * 4 + 64 * 256 * 4 * 2
    assert gradient.operations == 2 * 64 * 256 * 256


# Pairing kernels with calls


def recording(*calls: list[tuple[str, float]], leading: int = 0) -> list[KernelEvent]:
    """Return the profiler's events for the given calls, with a fill before each call."""
    events, now = [], 0.0
    for kernels in [*[[] for _ in range(leading)], *calls]:
        for name, us in [(FILL, 150.0), *kernels]:
            events.append(KernelEvent(name, now, us))
            now += us + 1
    return events


def pair(events: list[KernelEvent], fill: str, order: list[str]) -> dict[str, list[tuple[float, tuple[str, ...]]]]:
    found = kernels_of_calls(events, fill, order)
    return {name: [(busy_us(each), names_of(each)) for each in of_calls] for name, of_calls in found.items()}


def test_each_call_gets_the_kernels_behind_its_fill() -> None:
    events = recording([("a", 5)], [("split", 3), ("reduce", 2)], [("split", 4), ("reduce", 2)], [("a", 7)])
    found = pair(events, FILL, ["one", "two", "two", "one"])
    assert found == {"one": [(5, ("a",)), (7, ("a",))], "two": [(5, ("split", "reduce")), (6, ("split", "reduce"))]}


def test_time_in_which_kernels_of_a_call_overlap_counts_once() -> None:
    events = [KernelEvent(FILL, 0, 150), KernelEvent("maps", 151, 2), KernelEvent("product", 152, 10)]
    assert pair(events, FILL, ["x"]) == {"x": [(11, ("maps", "product"))]}
    inside = [*events[:2], KernelEvent("short", 151.5, 1)]
    assert pair(inside, FILL, ["x"]) == {"x": [(2, ("maps", "short"))]}


def test_pairing_goes_by_time_not_by_order_of_the_recording() -> None:
    events = recording([("a", 5)], [("b", 6)])
    assert pair(events[::-1], FILL, ["x", "y"]) == {"x": [(5, ("a",))], "y": [(6, ("b",))]}


@pytest.mark.parametrize("lost", range(timing.LEADING_FILLS + 1))
def test_leading_fills_may_be_lost(lost: int) -> None:
    events = recording([("a", 5)], [("b", 6)], leading=timing.LEADING_FILLS)[lost:]
    assert pair(events, FILL, ["x", "y"]) == {"x": [(5, ("a",))], "y": [(6, ("b",))]}


def test_a_lost_fill_is_noticed() -> None:
    calls = recording([("a", 5)], [("b", 6)], [("b", 7)], [("a", 8)])
    without_third_fill = [event for i, event in enumerate(calls) if i != 4]
    with pytest.raises(PairingError, match="expected 4 fills, one for each call, got 3"):
        pair(without_third_fill, FILL, ["x", "y", "y", "x"])
    with_leading = recording([("a", 5)], [("b", 6)], [("b", 7)], [("a", 8)], leading=1)
    with pytest.raises(PairingError, match="same kernels"):
        pair([event for i, event in enumerate(with_leading) if i != 5], FILL, ["x", "y", "y", "x"])


def test_a_lost_kernel_is_noticed() -> None:
    with pytest.raises(PairingError, match=r"x: expected the same kernels in every call.*no kernel"):
        pair(recording([("a", 5)], []), FILL, ["x", "x"])


def test_a_contender_that_fills_like_the_flush_is_noticed() -> None:
    with pytest.raises(PairingError, match="expected 1 fills"):
        pair(recording([(FILL, 1)] * (timing.LEADING_FILLS + 1)), FILL, ["x"])


def test_contenders_take_turns_in_every_place() -> None:
    order = rotated(["a", "b", "c"], 6)
    for place in range(3):
        assert Counter(order[place::3]) == {"a": 2, "b": 2, "c": 2}


def test_cold_times_are_those_of_the_second_recording_where_the_first_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = [recording([("a", 5)]), recording(*[[("a", float(us))] for us in (3, 1, 2)])]

    class Flush(timing.L2Flush):
        def __init__(self) -> None:
            self.name = FILL

        def __call__(self) -> None:
            pass

    def profiled(work: Callable[[], Any]) -> list[KernelEvent]:
        work()
        return recordings.pop(0)

    monkeypatch.setattr(timing, "profiled", profiled)
    calls, noticed = [], []
    times = timing.cold({"x": lambda: calls.append(1)}, Flush(), 3, lambda: noticed.append(1))
    assert times == {"x": (Spread(2, 1, 3), ("a",))}
    assert len(calls) == timing.WARM_UPS + 2 * 3
    assert len(noticed) == 2


# Statistics


def test_spread_is_median_least_and_most() -> None:
    assert Spread.of([5, 1, 9]) == Spread(5, 1, 9)
    assert Spread.of([4, 1]) == Spread(2.5, 1, 4)


def test_geometric_mean() -> None:
    assert geometric_mean([2, 8]) == pytest.approx(4)
    assert geometric_mean([]) is None


def made_up(kind: str = "dense", quick: bool = True) -> Report:
    """Make up a run: the fast product takes 1.25 times the floor, and deep_gemm 90% of the fast product's time."""
    report = Report(machine.header(kind, "made up", commit="abc"))
    report.header["machine"]["gpu"] = "NVIDIA H200"
    for case in cases_of(kind, quick=quick):
        fast = case.floor_us * 1.25

        def add(name: str, us: float, mode: str = "cold", case: Case = case, **more: Any) -> None:
            report.rows.append(Row.of(case, name, mode, Spread(us, us * 0.9, us * 1.1), error=1.7e-3, **more))

        add(OURS, fast * 0.9, config="128x128 s5", kernels=("fp8_gemm_dense",))
        if case.kind == "dense":
            add(FAST, fast)
            add(BF16, fast * 2)
            report.rows.append(Row.of(case, BLOCKWISE, "cold", None, failed="RuntimeError: not this shape"))
            add(OURS, fast, "sustained")
            add(FAST, fast, "sustained")
    return report


def test_comparisons_are_of_one_mode_and_estimate_deepgemm() -> None:
    report = made_up()
    for each in comparisons(report):
        if each.row.kind == "dense":
            assert each.to_fast == pytest.approx(0.9)
            ratio = peers.deepgemm_ratio_to_fast(H200, "dense", each.row.shape)
            assert each.to_deepgemm == pytest.approx(0.9 / (ratio or math.nan))
        else:
            assert each.to_fast is None
    report.header["machine"]["gpu"] = "NVIDIA H20"
    assert all(each.to_deepgemm is None for each in comparisons(report))
    for each in comparisons(report, "sustained"):
        assert each.to_fast == pytest.approx(1)
        assert each.to_deepgemm is None


def test_groups_are_compared_with_deepgemm_by_way_of_an_anchor() -> None:
    report = made_up("grouped")
    for each in comparisons(report):
        if each.row.kind != "dense":
            anchor = Case("dense", each.row.fast_shape or ())
            ratio = peers.deepgemm_ratio_to_fast(H200, each.row.kind, each.row.shape)
            deepgemm_us = anchor.floor_us * 1.25 * (ratio or math.nan)
            assert each.to_deepgemm == pytest.approx((each.row.us or math.nan) / deepgemm_us, rel=1e-3)


def test_the_yardstick_beside_groups_counts_its_own_operations_and_comes_before_the_anchor() -> None:
    case = Case("masked", (2, 512, 4096, 7168), (500, 520))
    report = made_up("grouped")
    report.rows = [
        Row.of(Case("dense", case.fast_shape), FAST, "cold", Spread(100.0, 99.0, 101.0)),
        Row.of(case, FAST, "cold", Spread(200.0, 199.0, 201.0)),
        Row.of(case, OURS, "cold", Spread(50.0, 49.0, 51.0)),
    ]
    assert report.rows[1].operations == report.rows[0].operations
    assert report.rows[1].floor_us == report.rows[0].floor_us
    (ours,) = comparisons(report)
    assert ours.to_deepgemm == pytest.approx(50 / (68.064 / 157.953 * 200))


def test_means_count_m_128_in_both_regimes_and_leave_failures_out() -> None:
    report = made_up()
    small, large, gradients = summaries(comparisons(report))
    assert (small.count, large.count, gradients.count) == (5, 8, 1)
    assert small.to_fast == pytest.approx(0.9)
    assert large.fraction_of_floor == pytest.approx(1 / 1.125, rel=1e-3)
    report.rows[0] = Row.of(Case("dense", (1, 576, 7168)), OURS, "cold", None, failed="no")
    assert summaries(comparisons(report))[0].count == 4


# Result files


def test_report_survives_the_round_trip(tmp_path: Path) -> None:
    report = made_up()
    path = tmp_path / "new" / "result.json"
    report.save(path)
    again = Report.load(path)
    assert again.header == {**report.header, "stopped": None}
    assert [(row.kind, row.shape, row.contender, row.failed) for row in again.rows] == [
        (row.kind, row.shape, row.contender, row.failed) for row in report.rows
    ]
    for row, before in zip(again.rows, report.rows, strict=True):
        assert row.us == pytest.approx(before.us, rel=1e-5) if before.us else row.us is None
    again.save(path)
    assert Report.load(path) == again
    assert list(path.parent.iterdir()) == [path]


def test_file_has_the_schema_that_is_documented(tmp_path: Path) -> None:
    made_up().save(tmp_path / "result.json")
    content = json.loads((tmp_path / "result.json").read_text())
    assert set(content) == {"header", "rows"}
    assert {"kind", "date", "machine", "versions", "commit", "dirty", "method"} <= set(content["header"])
    assert {"python", "torch", "cuda", "nvrtc"} <= set(content["header"]["versions"])
    first = content["rows"][0]
    assert first["shape"] == [1, 7168, 16384]
    assert {"kind", "contender", "mode", "us", "us_min", "us_max", "error", "config", "floor_us"} <= set(first)


def test_figures_that_json_cannot_hold_become_null(tmp_path: Path) -> None:
    report = made_up()
    report.rows = [Row("dense", (1, 8, 16), OURS, "cold", error=math.nan, failed="wrong: relative error nan")]
    report.save(tmp_path / "result.json")
    assert Report.load(tmp_path / "result.json").rows[0].error is None


def saved_with(path: Path, **of_first_row: Any) -> Path:
    """Save a report whose first row has these values in place of its own."""
    made_up().save(path)
    content = json.loads(path.read_text())
    content["rows"][0].update(of_first_row)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("{", "expected JSON"),
        ("[]", "expected an object with header and rows"),
        ('{"header": {}, "rows": []}', "the header lacks commit, date"),
        ({"mode": "warm"}, "mode: expected one of"),
        ({"speed": 1}, "unknown fields: speed"),
    ],
)
def test_files_of_another_schema_are_refused(tmp_path: Path, given: Any, complaint: str) -> None:
    path = tmp_path / "result.json"
    if isinstance(given, str):
        path.write_text(given)
    else:
        saved_with(path, **given)
    with pytest.raises(ValueError, match=complaint):
        Report.load(path)


def test_files_of_before_had_ratios_of_their_own(tmp_path: Path) -> None:
    now, before = saved_with(tmp_path / "now.json"), saved_with(tmp_path / "before.json", deepgemm_ratio_to_fast=7)
    assert comparisons(Report.load(before)) == comparisons(Report.load(now))


def test_default_path_names_kind_date_and_commit() -> None:
    report = made_up()
    report.header["date"] = "2026-11-21T03:30:37+00:00"
    assert report.default_path() == report_module.RESULTS / "dense-20261121T033037-abc.json"


def test_header_knows_the_code() -> None:
    header = machine.header("compile", "made up")
    assert Path(deep_gemm.__file__).parent == machine.PACKAGE
    assert len(header["source_sha256"]) == 64
    assert header["commit"] == "unknown" or len(header["commit"]) == 12
    assert header["versions"]["nvrtc"]


# Tables and plots


def test_table_shows_each_shape_its_ratios_and_the_means() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    benches.print_report(made_up(), console)
    text = console.export_text()
    line = next(line for line in text.splitlines() if line.startswith("8192x8192x8192"))
    assert "128x128 s5" in line
    assert "0.90" in line
    assert "dense, m <= 128" in text
    assert "sustained" in text
    assert text.count("RuntimeError: not this shape") == 1  # a reason is printed once for all shapes


@pytest.mark.few
@pytest.mark.parametrize("kind", ["dense", "grouped"])
@pytest.mark.parametrize("quick", [True, False])
def test_plots_are_pictures(tmp_path: Path, kind: str, quick: bool) -> None:
    made_up(kind, quick).save(tmp_path / "result.json")
    out = tmp_path / "pictures" / "plot.png"
    code, output = invoke("plot", str(tmp_path / "result.json"), str(out))
    assert code == 0, output
    assert out.read_bytes().startswith(b"\x89PNG")
    assert out.stat().st_size > 20_000


def test_plot_of_one_shape_and_of_none(tmp_path: Path) -> None:
    report = made_up()
    report.rows = report.rows[:2]
    command.plot_report(report, tmp_path / "one.svg")
    assert "<svg" in (tmp_path / "one.svg").read_text()
    report.rows = []
    with pytest.raises(command.UsageError, match="a plot needs cold times"):
        command.plot_report(report, tmp_path / "none.png")
    report.header["kind"] = "audit"
    with pytest.raises(command.UsageError, match="a plot needs a run of bench dense or bench grouped, got audit"):
        command.plot_report(report, tmp_path / "none.png")


# Contenders, on the CPU: their errors, and how failures are kept

SMALL = [
    Case("dense", (48, 200, 336)),
    Case("dense_1d1d", (48, 200, 336)),
    Case("contiguous", (2, 24, 136, 256), (24, 24)),
    Case("contiguous_uneven", (4, 70, 136, 256), (0, 50, 1, 19)),
    Case("masked", (1, 40, 136, 128), (33,)),
    Case("k_grouped", (2, 48, 136, 256), (256, 128)),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.kind)
def test_our_products_are_right_and_wrong_ones_are_found_out(case: Case) -> None:
    ours = contenders_of(case, "cpu")[0]
    assert ours.name == OURS
    limit = products.MAX_ERROR_FP32 if case.output_is_fp32 else products.MAX_ERROR_BF16
    error, failed = products.checked(ours, limit)
    assert failed is None
    assert 0 < some(error) < limit
    twice = Contender(OURS, lambda: ours.call() * 1.01, ours.parts, ours.reset)
    _, failed = products.checked(twice, limit)
    assert some(failed).startswith("wrong: relative error 0.01")


@pytest.mark.parametrize("kind", ["dense", "contiguous_uneven"])
def test_the_others_are_right_by_their_own_measure(kind: str) -> None:
    case = Case("dense", (48, 208, 336)) if kind == "dense" else SMALL[3]
    others = {contender.name: contender for contender in contenders_of(case, "cpu")}
    assert others[BF16].error() < 4e-3
    if kind == "dense":
        assert others[FAST].error() < 4e-3
        _, failed = products.checked(others[BLOCKWISE], 1)  # only CUDA has this product
        assert failed is not None


def test_a_product_that_leaves_its_output_unwritten_is_wrong() -> None:
    ours = contenders_of(SMALL[0], "cpu")[0]
    d = ours.call()
    lazy = Contender(OURS, lambda: d, ours.parts, ours.reset)
    assert products.checked(lazy, 1)[1] == "wrong: relative error nan, expected at most 1e+00"


def test_a_gpu_that_is_lost_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = raising(RuntimeError("illegal memory access\nmore lines"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(products.GpuLostError, match=r"^RuntimeError: illegal memory access$"):
        products.checked(Contender(OURS, broken, lambda got: []), 1)


# The command line


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def measured(folder: Path, *arguments: str, code: int = 0) -> tuple[Report, str]:
    """Run a bench that ends with this exit code; return the results in its file, and its output."""
    got, output = invoke("bench", *arguments, "--out", str(folder / "result.json"))
    assert got == code, output
    return Report.load(folder / "result.json"), output


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            "bench sparse",
            "kind: expected one of dense, grouped, fp4_dense, fp4_masked, fp4_contiguous, fine_dense, fine_masked, "
            "einsum, casts, linear, rows, experts, fp4_experts, few_experts, bf16_experts, attention, hc, bf16, "
            "training, distributed, host, compile, numerics, got 'sparse'",
        ),
        ("bench dense --shapes 1,2", "shapes: expected three or four positive integers"),
        ("bench compile --shapes 1,8,16", "--shapes chooses products, casts and layers, bench compile has its own"),
        ("bench host --shapes 1,8,16", "--shapes chooses products, casts and layers, bench host has its own"),
        ("bench host --plot x.png", "--plot draws products and layers, bench host has none"),
        ("bench compile --plot x.png", "--plot draws products and layers, bench compile has none"),
        ("plot /nowhere.json x.png", "deep_gemm: /nowhere.json: No such file or directory"),
        ("bench casts --only cublas", "only: expected some of deep_gemm, copy, compiled, torch, got 'cublas'"),
        ("bench linear --only ,", "only: expected some of deep_gemm, product_alone, bf16, copy, torch, got ','"),
        (
            "bench dense --only deep_gemm",
            "--only chooses contenders of einsum, casts, linear, rows, experts, fp4_experts, few_experts, "
            "bf16_experts, attention, hc, bf16, training, distributed, not of bench dense",
        ),
        ("bench casts --shapes 1,2", "shapes: expected listed shapes, got '1,2'"),
        ("bench casts --shapes 1", "shapes: expected two positive integers like 8192,7168, got '1'"),
        ("bench linear --shapes 1,2", "shapes: expected three positive integers like 64,2112,7168, got '1,2'"),
        ("bench experts --shapes 1,2", "shapes: expected five positive integers like 32,8,64,7168,2048, got '1,2'"),
        ("bench casts --plot x.png", "--plot draws products and layers, bench casts has none"),
    ],
)
def test_command_line_refuses_in_words(line: str, complaint: str) -> None:
    code, output = invoke(*line.split())
    assert code == 2
    assert complaint in output


def test_the_help_names_every_kind() -> None:
    (said,) = get_type_hints(bench, include_extras=True)["kind"].__metadata__
    assert said.help.replace(" or ", ", ") == ", ".join([*benches.BENCHES, "kernel"])


@pytest.mark.parametrize("kind", ["dense", "grouped", "host", "numerics", "casts", "linear", "experts"])
def test_without_a_gpu_the_command_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    code, output = invoke("bench", kind)
    assert code == 2
    assert "found no CUDA GPU; these run anywhere: `bench compile`, " in output


def test_compile_runs_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles_anew: None) -> None:
    monkeypatch.setattr(compile_times, "QUICK_COUNT", 2)
    report, output = measured(tmp_path, "compile", "--quick")
    assert "2 configurations compiled" in output
    rows = report.rows
    assert [row.mode for row in rows] == ["compile"] * 2
    assert all(row.us and row.us > 1e4 and row.config for row in rows)


def test_quick_compile_samples_configurations_evenly() -> None:
    assert len(compile_times.configurations(quick=True)) == compile_times.QUICK_COUNT
    assert set(compile_times.configurations(quick=True)) <= set(compile_times.configurations(quick=False))


class NoFlush:
    name = FILL


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put operands on the CPU, and make up times."""

    def cold(
        calls: dict[str, Callable[[], Any]], flush: object, repeats: int, while_busy: Callable[[], None]
    ) -> dict[str, tuple[Spread, tuple[str, ...]]]:
        while_busy()
        return {name: (Spread(100.0 + i, 99.0, 110.0), ("kernel" * 50,)) for i, name in enumerate(calls)}

    def small(case: Case) -> list[Contender]:
        with pytest.MonkeyPatch.context() as patch:  # the yardstick too: a CPU may take minutes for FP8 products
            patch.setattr(cases, "ANCHOR", (16, 32, 64))
            patch.setattr(cases, "ANCHOR_SHORT_K", (16, 32, 64))
            return contenders_of(next(each for each in SMALL if each.kind == case.kind), "cpu")

    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(products, "L2Flush", NoFlush)
    monkeypatch.setattr(products, "cold", cold)
    monkeypatch.setattr(products, "sustained", lambda call, us, while_busy: (while_busy(), Spread(us, us, us))[1])
    monkeypatch.setattr(products, "contenders_of", small)


def test_a_run_measures_keeps_shows_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    picture = tmp_path / "dense.png"
    arguments = ("--quick", "--sustained", "--plot", str(picture), "--commit", "abc")
    report, output = measured(tmp_path, "dense", *arguments)
    assert "commit abc" in output
    assert report.header["commit"] == "abc"
    modes = [row.mode for row in report.rows]
    assert modes == sorted(modes)  # no cold run follows a sustained one
    ours = [row for row in report.rows if row.contender == OURS]
    assert len(ours) == 2 * len(cases_of("dense", quick=True))
    assert all(row.error and row.us == 100 and len(row.kernels[0]) == 100 for row in ours if row.mode == "cold")
    refused = [row for row in report.rows if row.failed]
    assert {row.contender for row in refused} == {BLOCKWISE, BF16}  # a CPU has no kernels for these
    assert picture.exists()


def test_results_lie_in_the_checkout_wherever_one_stands(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, output = invoke("bench", "grouped", "--quick")
    assert code == 0, output
    assert not any((tmp_path / "here").iterdir())
    (path,) = results.iterdir()
    assert path.name.startswith("grouped-")
    assert {row.kind for row in Report.load(path).rows} == {case.kind for case in cases_of("grouped", quick=True)}


def test_a_failing_product_leaves_rows_and_a_bad_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(contenders, "fp8_gemm_nt", raising(RuntimeError("launch failed")))
    report, output = measured(tmp_path, "dense", "--shapes", "64,2112,7168", code=1)
    assert "no time for deep_gemm at 64x2112x7168: RuntimeError: launch failed" in output
    rows = {row.contender: row for row in report.rows}
    assert rows[OURS].us is None
    assert rows[FAST].us is not None


def test_a_lost_gpu_leaves_the_rows_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    before, turns = products.cold_rows, iter(range(10))

    def lost_in_the_second(case: Case, flush: Any, repeats: int) -> list[Row]:
        if next(turns) == 1:
            raise products.GpuLostError("RuntimeError: illegal memory access")
        return before(case, flush, repeats)

    monkeypatch.setattr(products, "cold_rows", lost_in_the_second)
    report, output = measured(tmp_path, "dense", "--quick", code=1)
    assert "stopped: RuntimeError: illegal memory access" in output
    assert report.header["stopped"] == "RuntimeError: illegal memory access"
    assert {row.shape for row in report.rows} == {(1, 7168, 16384)}


# Host time


def test_every_public_product_is_called_by_the_host_benchmark() -> None:
    calls = list(host.public_calls("cpu"))
    others = host.BARE_LAUNCH, "all in turn", "new m", "new weight"
    assert len(calls) + len([*host.layer_calls("cpu")]) + len(others) == host.STEPS
    called = {name.removeprefix("deep_gemm.") for name, _, _ in calls if name.startswith("deep_gemm.")}
    aliases = {getattr(deep_gemm, name) for name in called}
    for name in vars(deep_gemm)["__all__"]:
        if (
            "gemm" in name
            and not name.startswith("cublaslt")
            and getattr(deep_gemm, name).__module__ in ("deep_gemm.gemm.api.dense", "deep_gemm.gemm.api.grouped")
        ):
            assert getattr(deep_gemm, name) in aliases, name
    for _, _, call in calls:
        call()


def test_layers_are_called_by_the_host_benchmark() -> None:
    returned = {name: call() is not None for name, _, call in host.layer_calls("cpu")}
    layers = "deep_gemm.nn.Linear", "deep_gemm.nn.Experts", "torch.nn.Linear in BF16"
    steps = {f"{layer}, step" for layer in layers}
    assert {name for name in returned if ".nn." in name} == {*steps, *(f"{layer}, forward" for layer in layers)}
    assert {name for name, has_result in returned.items() if not has_result} == {
        *steps,
        "deep_gemm.bf16_gemm_nt",
        "deep_gemm.einsum",
    }


def test_new_ms_differ_and_run_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ms: list[int] = []
    monkeypatch.setattr("deep_gemm.gemm.api.dense.fp8_gemm_nt", lambda a, b, d: ms.append(a[0].shape[0]))
    for call in host.calls_with_new_m("cpu", count=8):
        call()
    assert len(set(ms)) == len(ms) == 9
    assert len({select(Sizes(m, host.N, host.K), Output(), gpus.H200) for m in ms}) == 1
    ms.clear()
    monkeypatch.setattr(deep_gemm, "bf16_gemm_nt", lambda a, b, d: ms.append(a.shape[0]))
    for call in host.calls_with_new_m_of_bf16("cpu", count=8):
        call()
    assert len(set(ms)) == len(ms) == 9


def test_new_weights_differ_and_run_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    monkeypatch.setattr("deep_gemm.gemm.api.dense.fp8_gemm_nt", lambda a, b, d: sizes.append(tuple(b[0].shape)))
    calls = host.calls_with_new_weight("cpu", count=4)
    assert menu_of.cache_info().currsize == 0, "the first call includes the choice"
    for call in calls:
        call()
    assert len(set(sizes)) == len(sizes) == 5
    assert len({select(Sizes(host.M, n, k), Output(), gpus.H200) for n, k in sizes}) == 1


def test_the_first_of_some_calls_is_not_timed() -> None:
    calls = [lambda seconds=seconds: time.sleep(seconds) for seconds in (0.2, 0.002, 0.004)]
    spread = host.first_calls(calls)
    assert 2e3 < spread.us_min < spread.us_max < 1e5


def test_warm_time_is_of_one_call() -> None:
    calls = [lambda seconds=seconds: time.sleep(seconds) for seconds in (0.002, 0.02)]
    one, other = host.in_turn(calls, rounds=3, in_a_row=5)
    assert 2e3 < one.us_min <= one.us <= one.us_max < other.us_min < 1e5


# On a GPU


@pytest.mark.gpu
def test_one_shape_on_the_gpu(tmp_path: Path) -> None:
    out = tmp_path / "dense.json"
    code, output = invoke("bench", "dense", "--quick", "--shapes", "128,4096,7168", "--out", str(out))
    rows = {row.contender: row for row in Report.load(out).rows}
    assert set(rows) == {OURS, FAST, BLOCKWISE, BF16}
    for name in (FAST, BLOCKWISE, BF16):
        row = rows[name]
        assert row.failed is None, row.failed
        assert 0.9 * (row.floor_us or 0) < (row.us or 0)
        assert row.us_min is not None
        assert some(row.error) < 5e-2  # fast accumulation drops bits
    assert code == (1 if rows[OURS].failed else 0), output


@pytest.mark.gpu
def test_cold_times_on_the_gpu_grow_with_the_bytes() -> None:
    flush = timing.L2Flush()
    small, large = (torch.randn(size, device="cuda") for size in (1 << 20, 1 << 26))
    times = timing.cold({"small": lambda: small + 1, "large": lambda: large + 1}, flush, 4)
    (small_spread, kernels), (large_spread, _) = times["small"], times["large"]
    assert len(kernels) == 1
    assert 0 < small_spread.us_min <= small_spread.us < large_spread.us
