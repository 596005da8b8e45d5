"""Tables of every bench: made-up rows printed in 80 columns, and the stored result files."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from thorough import few

from deep_gemm.cli.models import BLOCK
from lab.bench import (
    attention,
    bf16,
    bf16_experts,
    casts,
    command,
    distributed,
    einsum,
    experts,
    few_experts,
    fine,
    fp4,
    fp4_experts,
    hc,
    linear,
    machine,
    numerics,
    products,
    rows,
    training,
    yardsticks,
)
from lab.bench.benches import BENCHES, print_report
from lab.bench.bulk_read import READ
from lab.bench.cases import RESULTS_FOLDER, all_cases, cases_of, grid_cases, tuned_weights
from lab.bench.compare import comparisons, summaries
from lab.bench.contenders import BF16, FAST, OURS
from lab.bench.grid import GROUPED_KINDS, MS, MS_OF_A_WEIGHT, all_weights, expert_weights
from lab.bench.layers import ALONE, COPY, EAGER
from lab.bench.report import Report, Row
from lab.bench.timing import Spread
from lab.bench.tune_fit import Collected

Listed = list[tuple[str, tuple[int, ...]]]
OF_KINDS = {"einsum": einsum, "casts": casts, "attention": attention, "hc": hc, "bf16": bf16, "rows": rows}
LAYERS = {"linear": linear, "experts": experts, "fp4_experts": fp4_experts, "few_experts": few_experts}
LAYERS |= {"bf16_experts": bf16_experts}
LISTED: Mapping[str, Listed] = {
    **{name: module.KINDS.shapes_of() for name, module in OF_KINDS.items()},
    **{name: [(name, shape) for shape in module.shapes_of()] for name, module in LAYERS.items()},
    **{name: [(name, each.shape) for each in products.cases_of(name)] for name in products.WITH_OWN_RIVALS},
    "training": [(training.kind_of(shape), shape) for shape in training.SHAPES],
    "distributed": [("ep_layer" if len(shape) == 6 else "ep_step", shape) for shape in distributed.SHAPES],
    "host": [("host", (0, 256, 256))],
    "numerics": [(kind, shape) for kind, shape, _ in numerics.steps()],
}
"""Kinds and shapes of each bench that fits 80 columns."""
OF_FINE = {fine.USUAL: 60.0, **dict(zip(fine.SAID, (90.0, 120.0, 30.0, 180.0), strict=True)), BF16: 80.0}
WIDE = ("casts", "attention", "hc", "bf16", "host", "numerics")
"""Benches whose cells may be cut in a terminal of 80 columns."""
RIVALS = {
    "casts": {OURS: 60.0, COPY: 30.0, casts.COMPILED: 90.0, EAGER: 120.0},
    "rows": {OURS: 60.0, "torch_fast": 80.0, "torch_exact": 90.0, "cutlass": 75.0, "deep_gemm_128x128": 120.0},
    "linear": {OURS: 60.0, ALONE: 50.0, BF16: 90.0, COPY: 10.0, EAGER: 100.0},
    "experts": {OURS: 60.0, ALONE: 50.0, BF16: 90.0, EAGER: 100.0},
    "einsum": {OURS: 60.0, einsum.ROW_MAJOR: 63.0, BF16: 120.0, ALONE: 40.0},
    **{key: {OURS: 60.0, EAGER: 90.0} for key in ("attention", "hc", "bf16")},
    **{key: {OURS: 60.0, fp4.FP8: 120.0, READ: 30.0} for key in ("fp4_masked", "fp4_contiguous", "fp4_experts")},
    "fp4_dense": {OURS: 60.0, fp4.FP8: 120.0, READ: 30.0, fp4.HUMMING: 80.0},
    "few_experts": {OURS: 60.0, fp4.VLLM: 120.0, READ: 30.0},
    "bf16_experts": {OURS: 60.0, BF16: 80.0, fp4.VLLM: 120.0, READ: 30.0},
    **dict.fromkeys(("fine_dense", "fine_masked"), OF_FINE),
    "training": {OURS: 60.0, training.ROWS: 80.0, training.AO: 160.0, training.AO_COMPILED: 100.0, BF16: 90.0},
    "distributed": {distributed.GROUP: 60.0, distributed.FUSED: 55.0, distributed.MEGA: 45.0, ALONE: 50.0},
    "host": {"deep_gemm.fp8_gemm_nt": 60.0},
    "numerics": {OURS: 60.0, FAST: 90.0, BF16: 120.0},
}
LINES: Mapping[str, tuple[str, ...]] = {
    "casts": ("cast_1x128 1x7168 60.00 50% 30.00 90.00 120.0 1.67",),
    "rows": ("4096x28672x4096 60.00 80.00 0.75 90.00 0.67 75.00 0.80 120.0 0.50", "from 1024 28 0.75 0.67 0.80 0.50"),
    "linear": ("4096x2112x7168 60.00 50.00 1.20 60.00 1.00 90.00 0.67 100.0", "4096 7 1.20 1.00 0.67"),
    "experts": ("256 8192 7168x2048 60.00 90.00 0.67 50.00 83% 100.0", "256 7168x2048 7 0.67"),
    "einsum": ("4096x8x4096x1024 60.00 63.00 120.0 0.50 212.5 0.28", "4096x32768x512 60.00 40.00 1.50 129.5 0.46"),
    "attention": ("mqa_logits 2048x8192x64x128 60.00 224.6 0.27 42% 90.00 5000 1.67",),
    "hc": ("hc_prenorm 137x24x7168x0 60.00 28.58 2.10 42% 90.00 5000 1.67",),
    "bf16": ("bf16_dense 1x2112x7168 60.00 15.49 3.87 42% 90.00 5000 1.67",),
    "fp4_dense": ("16x4096x7168 60.00 30.00 2.00 120.0 0.50 80.00 0.75 1.11", "to 64, from 29 MB judged"),
    "fp4_masked": ("8x16x4096x7168 60.00 30.00 2.00 120.0 0.50",),
    "fp4_contiguous": ("from 1024 judged",),
    "fp4_experts": ("48x8x8x6144x2048 60.00 30.00 2.00 120.0 0.50", "from 1024"),
    "few_experts": (
        "64x6x1024x2048x352 60.00 30.00 2.00 120.0 0.50",
        "64x6x1024x2048x352 deep_gemm: product 54.0; fp8_gemm",
        "64x6x1024x2048x352 vllm: product 54.0; error 0.01, table unknown",
    ),
    "bf16_experts": ("128x8x4096x2048x768 60.00 30.00 2.00 80.00 0.75 120.0 0.50",),
    "fine_dense": ("1024x4096x7168 60.00 80.00 90.00 1.50 120.0 2.00 30.00 0.50 180.0 3.00", "32x32 by 1x128 to 64"),
    "fine_masked": ("8x16x4096x7168 60.00 80.00 90.00 1.50 120.0 2.00 30.00 0.50 180.0 3.00",),
    "training": (
        "128x8x32768x2048x768 60.00 90.00 0.67 5000 2.1 2.1 60.00 90.00",
        "a step of 128x8x32768x2048x768 us",
        "4096x4096x4096 80.00 60.00 160.0 100.0 0.80 90.00 0.89",
        "4096x1024x4096x300 deep_gemm by rows 0.01",
        "product 54.00",
    ),
    "distributed": ("ep_layer 384 8192 1 60.00 55.00 45.00 50.00 5.00",),
    "host": ("deep_gemm.fp8_gemm_nt anyx256x256 warm 60.00 59.00 61.00 1 60.00",),
    "numerics": ("fp8_gemm_nt 256x256x65536 normal float32 1.0e-02 3.0e-02 1.0e-03 1.0e-02 1.0e-02",),
}
"""Lines that each table must have, with single spaces between words."""


SAME: dict[str, Any] = {"error": 0.01, "error_with_cast": 0.03, "bias": 0.001, "floor_us": 25.0, "bytes": 10**8}
SAME |= {"operations": 3 * 10**11, "kernels": ("fp8_gemm",), "operands": "normal", "output": "float32"}
SAME |= {"peak_bytes": 1 << 31}


def made_up(bench: str, times: float = 1.0) -> Report:
    """Make up a run in which each contender took the time in `RIVALS`."""
    header = {"kind": bench, "commit": "0", "machine": {"gpu": "NVIDIA H200", "cpu": ""}, "stopped": None}
    modes = {"training": (training.STEP, training.FORWARD), "host": ("host",), "numerics": (numerics.MODE,)}
    is_judged = True if bench.startswith(("fp4_", "fine_")) and not bench.endswith("experts") else None
    more = {**SAME, "parts": {"product": 54.0 * times}, "is_judged": is_judged}
    rows = [
        Row(kind, shape, name, mode, us * times, us - 1, us + 1, **more)
        for kind, shape in LISTED[bench]
        for name, us in RIVALS[bench].items()
        for mode in modes.get(bench, ("cold",))
    ]
    sticks = yardsticks.rows_of({"copy": Spread(256.22, 1, 2), "bf16_dense": Spread(1400.71, 1, 2)})
    return Report(header, rows if bench in ("distributed", "host", "numerics") else [*sticks, *rows])


def printed(report: Report, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    print_report(report, console)
    return console.export_text().splitlines()


@pytest.mark.parametrize("bench", LISTED)
def test_a_table_has_each_shape_and_its_rivals(bench: str) -> None:
    lines = [" ".join(line.split()) for line in printed(made_up(bench), 160)]
    for expected in LINES[bench]:
        assert any(line.startswith(expected) for line in lines), expected
    assert f"{bench} on NVIDIA H200, commit 0" in lines


@pytest.mark.parametrize("bench", sorted(LISTED.keys() - {*WIDE}))
def test_tables_fit_80_columns(bench: str) -> None:
    lines = printed(made_up(bench, 16.675))
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_every_bench_is_printed_here_or_beside_the_products() -> None:
    assert set(LISTED) == set(RIVALS) == set(LINES) == set(BENCHES) - {"dense", "grouped", "compile"}
    for name, bench in BENCHES.items():
        assert bench.method and (not bench.contenders or set(RIVALS[name]) <= set(bench.contenders))


@pytest.mark.parametrize("bench", ["linear", "dense", "distributed"])
def test_a_failure_is_told_once_for_all_shapes(bench: str) -> None:
    rows = [Row(bench, (1, m, 3, 1, 1), OURS, "cold", failed="[wrong] it is") for m in (1, 2)]
    report = replace(made_up("linear"), rows=rows)
    report.header.update(kind=bench, stopped="the GPU is lost")
    lines = printed(report)
    assert "no time for deep_gemm at 1x1x3x1x1 1x2x3x1x1: [wrong] it is" in lines
    assert lines[-1] == "stopped: the GPU is lost"


def test_compile_runs_are_summed_up() -> None:
    rows = [Row("compile", (64, 16), OURS, "compile", us, us, us, config="64x16") for us in (2e5, 1e5, 4e5)]
    report = Report({"kind": "compile", "commit": "0", "machine": {"gpu": None, "cpu": "a CPU"}}, rows)
    assert "3 configurations compiled, median 200 ms, slowest 400 ms (64x16)" in printed(report)
    assert "nothing compiled" in printed(replace(report, rows=[]))


KEPT = few(sorted(RESULTS_FOLDER.glob("*.json")), lambda path: path.name.split("-")[:1])


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_result_files_that_are_kept_are_printed(path: Path) -> None:
    try:
        report = Report.load(path)
    except ValueError:  # another tool wrote the file
        assert path.name.split("-")[0] in ("compilers", "engines", "sanitizers", "soak", "timeline", "tune")
        return
    lines = printed(report, 160)
    shapes = {"x".join(map(str, row.shape)) for row in report.rows if row.contender == OURS and row.mode == "cold"}
    text = "\n".join(lines)
    assert lines[1].startswith(f"{report.kind} on ")
    assert all(shape in text for shape in shapes) or report.kind in ("experts", "distributed")


# Dense cases that no tuning used: the rule that selects them, and the part that is judged.


def test_new_weights_meet_all_sizes_of_batch() -> None:
    shapes = [case.shape for case in grid_cases() if case.kind == "dense"]
    assert len(shapes) == len(set(shapes))
    weights = {shape[1:] for shape in shapes}
    assert weights <= set(all_weights())
    assert not weights & tuned_weights()
    counts = Counter(shape[0] for shape in shapes)
    assert set(counts) == set(MS)
    assert max(counts.values()) - min(counts.values()) <= 3
    assert max(Counter(shape[1:] for shape in shapes).values()) == MS_OF_A_WEIGHT
    assert sum(m & (m - 1) != 0 for m in MS) > len(MS) / 2  # most values of m are no powers of two
    ns, ks = {n for n, _ in weights}, {k for _, k in weights}
    assert min(ns) <= 512 and max(ns) >= 28672 and min(ks) <= 512 and max(ks) >= 14336


def test_no_choice_was_fitted_to_a_judged_weight() -> None:
    """Check the benchmark's cases and the cost model's times, except the times that were held back from its fit."""
    judged = {case.shape for case in grid_cases() if case.is_judged}
    files = map(Collected.load, RESULTS_FOLDER.glob("tune-*"))
    fitted = [each for file in files for each in file.products if each.is_fitted]
    assert not {shape[1:] for shape in judged if len(shape) == 3} & {(each.n, each.k) for each in fitted}
    assert {(each.n, each.k) for each in fitted} <= tuned_weights()
    assert {(576, 7168), (7168, 2048), (2112, 4096), (4096, 7168)} <= tuned_weights()  # the last two as groups too


def test_groups_are_of_every_kind_and_of_experts_in_use() -> None:
    groups = [case for case in grid_cases() if case.kind != "dense"]
    counts = Counter((case.kind, case.is_judged) for case in groups)
    assert min(counts[kind, True] for kind in GROUPED_KINDS) >= 8
    weights = set(expert_weights())
    for case in groups:
        n, k = case.shape[1:3] if case.kind == "k_grouped" else case.shape[2:]
        assert (case.shape[0], n, k) in weights
        assert (n, k) not in tuned_weights()
        assert len(case.sizes) == case.shape[0]
        if case.kind == "contiguous_uneven":
            assert sum(case.sizes) == case.shape[1]
            assert max(case.sizes) > 2 * min(case.sizes)
        assert max(case.sizes) <= case.max_m or case.kind != "masked"
        assert case.kind != "k_grouped" or case.shape[3] % BLOCK == 0
    assert {case.shape for case in cases_of("grouped", is_judged=True)} > {c.shape for c in groups if c.is_judged}


def test_a_weight_is_either_fitted_or_judged() -> None:
    dense = [case for case in grid_cases() if case.kind == "dense"]
    parts = {part: {case.shape[1:] for case in dense if case.is_judged is part} for part in (False, True)}
    assert not parts[False] & parts[True]
    assert 3 * len(parts[False]) < len(parts[True]) < 6 * len(parts[False])
    assert not any(case.is_judged for case in all_cases())


def test_parts_make_up_all_dense_cases() -> None:
    fitted, judged = (cases_of("dense", is_judged=part) for part in (False, True))
    assert all(case.is_judged for case in judged)
    assert set(fitted) | set(judged) == set(cases_of("dense"))
    assert len(fitted) + len(judged) == len(cases_of("dense"))


def test_the_field_survives_a_file_and_old_files_have_none(tmp_path: Path) -> None:
    judged = next(case for case in grid_cases() if case.is_judged)
    rows = [Row.of(case, OURS, "cold", Spread(2.0, 1.0, 3.0)) for case in (judged, all_cases()[0])]
    Report(machine.header("dense", "as usual", "abc"), rows).save(tmp_path / "f.json")
    assert [row.is_judged for row in Report.load(tmp_path / "f.json").rows] == [True, False]
    text = json.loads((tmp_path / "f.json").read_text())
    for row in text["rows"]:
        del row["is_judged"]
    (tmp_path / "old.json").write_text(json.dumps(text))
    assert [row.is_judged for row in Report.load(tmp_path / "old.json").rows] == [None, None]


def test_means_of_what_is_judged_stand_apart() -> None:
    def rows(shape: tuple[int, ...], us: float, *, is_judged: bool | None) -> list[Row]:
        return [
            Row("dense", shape, name, "cold", us=took, fast_shape=shape, is_judged=is_judged)
            for name, took in ((OURS, us), (FAST, 10.0))
        ]

    header = {"machine": {"gpu": "NVIDIA H200"}}
    few, many, known = (16, 512, 1024), (1000, 512, 1024), (17, 512, 2048)
    judged = [*rows(few, 8, is_judged=True), *rows(many, 12.5, is_judged=True)]
    report = Report(header, [*judged, *rows(known, 20, is_judged=False)])
    found = {each.regime: each for each in summaries(comparisons(report))}
    assert found["judged, dense"].count == 2
    means = {"judged, dense": 1.0, "judged, m <= 128": 0.8, "judged, m > 128": 1.25, "dense, m <= 128": 2.0}
    assert {regime: found[regime].to_fast for regime in means} == pytest.approx(means)
    worst = found["judged, dense"].worst
    assert worst is not None and worst.row.shape == many


def test_a_part_is_of_products_alone() -> None:
    with pytest.raises(command.UsageError, match="--part chooses among all cases of bench dense, grouped, fp4_dense"):
        command.run("casts", part="judged")
    with pytest.raises(command.UsageError, match="expected one of fitted, judged, got 'best'"):
        command.run("dense", part="best")
