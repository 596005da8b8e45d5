"""`bench numerics`: its parts and a quick run on the CPU, and a smoke test on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import raising
from rich.console import Console
from test_docs import script
from torch import Tensor

from deep_gemm.gemm.ask.dense import dense_problem
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds.output import Output
from lab.bench import benches, command, numerics
from lab.bench.contenders import BF16, FAST, OURS
from lab.bench.numerics import KINDS, ONE_BIG, OPERANDS
from lab.bench.report import Report, Row
from lab.sim import product as simulated

SMALL = {"m_grouped_fp8_gemm_nt_contiguous": (2, 128, 256, 256), "m_grouped_fp8_gemm_nt_masked": (2, 128, 256, 256)}


def rows_of(steps: list[numerics.Step], device: str = "cpu") -> list[Row]:
    rows: list[Row] = []
    numerics.measure(steps, device, add=rows.extend, announce=lambda _: None)
    return rows


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ONE_BIG])
def test_every_product_is_near_the_fp64_product_of_its_numbers_and_the_cast_is_what_is_far(kind: str) -> None:
    shape = SMALL.get(kind, KINDS[kind].shapes[0])
    for row in rows_of([(kind, shape, operands) for operands in ("normal", "positive")]):
        if row.contender != OURS:
            continue
        assert row.failed is None
        assert row.error is not None
        assert row.error_with_cast is not None
        assert row.error < (3e-3 if row.output == "bfloat16" else 1e-6)
        if ("fp8" in kind or kind == "linear") and row.operands == "normal":
            assert 0.01 < row.error_with_cast < 0.06
        if kind.startswith(("bf16", "einsum")):
            assert row.error_with_cast == row.error


def test_a_wrong_product_and_one_that_writes_nothing_are_noticed() -> None:
    right = torch.ones(2, 2, dtype=torch.float64)

    def way(got: Tensor) -> Row:
        ours = numerics.Way(OURS, torch.float32, lambda: got, lambda: right, lambda: right)
        return numerics.row_of("fp8_gemm_nt", (2, 2, 2), "normal", ours)

    assert way(torch.ones(2, 2)).failed is None
    assert way(torch.full((2, 2), 1.1)).failed == "wrong: error 0.1"
    assert way(torch.full((2, 2), torch.nan)).failed == "wrong: error nan"
    assert way(torch.full((2, 2), 0.99)).bias == pytest.approx(-0.01)


def test_a_way_that_refuses_leaves_its_reason() -> None:
    refuse = raising(ValueError("not here"))
    way = numerics.Way(FAST, torch.float32, refuse, refuse, refuse)
    row = numerics.row_of("fp8_gemm_nt", (2, 2, 2), "normal", way)
    assert (row.error, row.failed) == (None, "ValueError: not here")


@pytest.mark.parametrize("kind", ONE_BIG)
def test_sums_that_are_exact_lose_none_of_the_small_products_and_dropped_ones_count(kind: str) -> None:
    rows = rows_of([(kind, (gap,), "normal") for gap in (numerics.GAPS[0], 13, numerics.GAPS[-1])])
    assert [row.error for row in rows if row.contender == OURS] == [0, 0, 0]
    (way, *_) = KINDS[kind].make((13,), OPERANDS["normal"])
    big = torch.full((numerics.M, numerics.N), 2.0**16)
    lost = numerics.Way(OURS, torch.float32, lambda: big, way.given, way.asked)
    assert numerics.row_of(kind, (13,), "normal", lost).error == 1


def test_operands_are_what_their_names_say() -> None:
    torch.manual_seed(0)
    drawn = {name: draw(64, 64, 1024) for name, draw in OPERANDS.items()}
    assert bool((drawn["positive"][0] >= 0).all())
    assert float(drawn["heavy"][0].abs().max()) > 10 * float(drawn["normal"][0].abs().max())
    sizes = {name: float((x.double() @ w.double().t()).norm()) for name, (x, w) in drawn.items()}
    assert sizes["cancelling"] < sizes["normal"] / 4
    assert sizes["positive"] > sizes["normal"] * 8


def test_a_quick_run_needs_no_gpu_and_its_figures_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    chosen = [step for step in numerics.steps(quick=True) if step[0] in ("fp8_gemm_nt", *ONE_BIG)]
    monkeypatch.setattr(numerics, "steps", lambda quick: chosen)
    assert command.run("numerics", quick=True, out=tmp_path / "numerics.json", commit="here")
    report = Report.load(tmp_path / "numerics.json")
    assert {row.mode for row in report.rows} == {numerics.MODE}
    console = Console(width=160, record=True)
    benches.print_report(report, console)
    assert "one_big_next_block" in console.export_text()


def made_up() -> Report:
    """Make up the figures of a run: each product, at two depths, with every contender."""
    header: Any = {
        "kind": "numerics",
        "date": "2026-11-23T12:00:00",
        "commit": "abc",
        "machine": {"gpu": "NVIDIA H200"},
    }
    ways = [(OURS, 1e-4), (FAST, 1e-3), (numerics.EXACT, 2e-4), (BF16, 1e-7)]
    rows = [
        Row(
            kind, shape, name, numerics.MODE, error=error, error_with_cast=0.03, bias=-error, operands=which, output=out
        )
        for kind, shape, which in numerics.steps()
        for name, error in ways
        for out in ("float32", "bfloat16")
    ]
    return Report(header, rows)


def test_the_page_has_what_its_script_writes_of_the_file_that_it_names() -> None:
    drawing = script("draw_numerics")
    page = drawing.PAGE.read_text()
    begin, end = page.index(drawing.BEGIN), page.index(drawing.END)
    name = drawing.named_file(page[begin:end])
    if name is not None:
        assert drawing.section(Report.load(drawing.RESULTS / name), name) == page[begin + len(drawing.BEGIN) : end]


def test_the_script_writes_tables_and_a_picture(tmp_path: Path) -> None:
    drawing = script("draw_numerics")
    report = made_up()
    text = drawing.section(report, "numerics-abc.json")
    assert drawing.named_file(text) == "numerics-abc.json"
    for kind in KINDS:
        assert f"`{kind}`" in text or kind in ONE_BIG
    assert max(map(len, text.splitlines())) <= 160
    drawing.draw(report, tmp_path / "numerics.png")
    assert (tmp_path / "numerics.png").read_bytes().startswith(b"\x89PNG")
    page = tmp_path / "numerics.md"
    page.write_text(f"before\n{drawing.BEGIN}old{drawing.END}\nbehind\n")
    drawing.write(page, text)
    assert page.read_text() == f"before\n{drawing.BEGIN}{text}{drawing.END}\nbehind\n"


LOST = {"one_big_same_step": [0, 0, 1], "one_big_same_block": [0, 0, 1], "one_big_next_block": [0, 0, 0]}
"""Fractions of the small products that are lost if they are 12, 13 and 14 powers of two below the big product."""


@pytest.mark.host_compiler
def test_the_simulated_tensor_cores_lose_what_the_page_says() -> None:
    m, n, k = 64, 128, 256
    config = tile_config(64, 64, Output(is_fp32=True), k=k)
    kernel = simulated.compile_config(config)
    for kind, at in ONE_BIG.items():
        lost = []
        for gap in (12, 13, 14):
            a, b = numerics.one_big_operands(kind, gap)
            a, b = a[:m], b[:n]
            operands = (a.to(torch.float8_e4m3fn), torch.ones(m, 2)), (b.to(torch.float8_e4m3fn), torch.ones(1, 2))
            p = dense_problem(*operands, torch.full((m, n), torch.nan), None)
            d = simulated.run(kernel, config, p, truncate=True).d
            lost.append(float(((a @ b.t() - d) / (a[:, at] @ b[:, at].t())).mean()))
        assert lost == LOST[kind]


@pytest.mark.gpu
def test_errors_on_a_gpu_are_those_of_the_hardware() -> None:
    """Tensor cores cut off bits of the sums within a block. The sums over blocks lose no bits in this way."""
    rows = rows_of(
        [("fp8_gemm_nt", (256, 256, 1024), "normal"), ("fp8_gemm_nt_few_rows", (16, 256, 1024), "normal")], "cuda"
    )
    ours = [row for row in rows if row.contender == OURS]
    assert all(row.failed is None for row in ours)
    assert all(row.error is not None and 2e-5 < row.error < 1e-3 for row in ours if row.output == "float32")
    lost = {
        kind: [
            row.error
            for row in rows_of([(kind, (gap,), "normal") for gap in (12, 13, 14)], "cuda")
            if row.contender == OURS
        ]
        for kind in ONE_BIG
    }
    assert lost == LOST
