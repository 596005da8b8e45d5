"""`bench einsum`, what needs no GPU of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from deep_gemm.cli.console import WIDTH_WITHOUT_TERMINAL
from lab.bench import command, einsum, skip_head_mid, table, yardsticks
from lab.bench.contenders import BF16, OURS
from lab.bench.layers import ALONE
from lab.bench.report import Report, Row
from lab.bench.timing import L2Flush, Spread

SHAPE = (5, 3, 272, 136)


@pytest.fixture
def heads() -> einsum.Heads:
    torch.manual_seed(0)
    return einsum.Heads(SHAPE, "cpu")


def test_all_ways_compute_the_same(heads: einsum.Heads) -> None:
    for name, call in heads.calls().items():
        if name == BF16:
            assert call().shape == heads.out.shape
        else:
            assert heads.error(call) < einsum.MOST_ERROR


def test_a_wrong_result_is_noticed(heads: einsum.Heads) -> None:
    def nearly() -> None:
        heads.calls()[OURS]()
        heads.out[:, 1] *= 1.05

    assert einsum.wrong_if(heads.error(nearly)) is not None
    assert einsum.wrong_if(heads.error(lambda: None)) is not None  # NaN


def test_few_shapes_are_some_of_all() -> None:
    assert set(einsum.shapes_of(quick=True)) < set(einsum.shapes_of())
    assert set(einsum.CONTENDERS) == set(einsum.Heads(SHAPE, "cpu").calls())


def test_a_run_has_rows_of_all_ways_and_of_both_yardsticks(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Spread(10.0, 9.0, 11.0)
    monkeypatch.setattr(einsum, "Heads", lambda shape, _, make=einsum.Heads: make(shape, "cpu"))
    monkeypatch.setattr(einsum, "L2Flush", lambda: None)
    monkeypatch.setattr(einsum, "cold", lambda calls, *_: dict.fromkeys(calls, (spread, ("a kernel",))))
    measured = dict.fromkeys((yardsticks.COPY, yardsticks.PRODUCT), spread)
    monkeypatch.setattr(yardsticks, "measure", lambda _: yardsticks.rows_of(measured))
    rows: list[Row] = []
    einsum.measure([SHAPE], add=rows.extend, announce=lambda _: None)
    assert [row.contender for row in rows if row.kind == einsum.KIND] == list(einsum.CONTENDERS)
    assert [row.failed for row in rows] == [None] * len(rows)
    assert {row.kind for row in rows} == {einsum.KIND, yardsticks.COPY, yardsticks.PRODUCT}
    rows = []
    einsum.measure([SHAPE], only=(OURS,), add=rows.extend, announce=lambda _: None)
    assert [row.contender for row in rows if row.kind == einsum.KIND] == [OURS]


def test_the_table() -> None:
    header: dict[str, Any] = {"kind": "einsum", "commit": "0", "machine": {"gpu": "NVIDIA H200", "cpu": ""}}
    measured = {yardsticks.COPY: Spread(254.8, 250.0, 260.0), yardsticks.PRODUCT: Spread(1500.0, 1490.0, 1510.0)}
    shape = einsum.QUICK_SHAPES[0]
    times = zip(einsum.CONTENDERS, (13.6, 13.8, 24.2), strict=True)
    rows = [Row(einsum.KIND, shape, name, "cold", us=us) for name, us in times]
    report = Report(header, [*yardsticks.rows_of(measured), *rows])
    console = Console(width=WIDTH_WITHOUT_TERMINAL, record=True, file=io.StringIO())
    table.print_report(report, console)
    line = next(line for line in console.export_text().splitlines() if "4x8x4096x1024" in line)
    assert all(figure in line for figure in ("13.60", "13.80", "24.20", "0.56"))


def test_the_table_of_products_into_heads() -> None:
    header: dict[str, Any] = {"kind": "einsum", "commit": "0", "machine": {"gpu": "NVIDIA H200", "cpu": ""}}
    shape = skip_head_mid.QUICK_SHAPES[1]
    times = zip(skip_head_mid.CONTENDERS, (134.4, 129.0), strict=True)
    report = Report(header, [Row(skip_head_mid.KIND, shape, name, "cold", us=us) for name, us in times])
    console = Console(width=WIDTH_WITHOUT_TERMINAL, record=True, file=io.StringIO())
    table.print_report(report, console)
    line = next(line for line in console.export_text().splitlines() if "4096x32768x512" in line)
    assert all(figure in line for figure in ("134.4", "129.0", "1.04"))


def test_shapes_may_be_new() -> None:
    total, _ = command._casts_or_layers("einsum", False, "7,3,256,128")
    assert total == 1
    total, _ = command._casts_or_layers("einsum", False, "7,3,256,128;128,8192,512")
    assert total == 2
    with pytest.raises(ValueError, match="shapes: expected"):
        command._casts_or_layers("einsum", False, "7,3")


def test_products_into_heads_follow_if_one_of_their_contenders_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[tuple[str, int]] = []
    monkeypatch.setattr(einsum, "measure", lambda shapes, **_: measured.append(("of heads", len(shapes))))
    monkeypatch.setattr(skip_head_mid, "measure", lambda shapes, **_: measured.append(("into heads", len(shapes))))
    for only in ((), (einsum.ROW_MAJOR,), (ALONE,)):
        _, measure = command._casts_or_layers("einsum", True, None)
        measure(only=only, add=lambda _: None, announce=lambda _: None)
    assert measured == [
        ("of heads", 2),
        ("into heads", 2),
        ("of heads", 2),
        ("into heads", 0),
        ("of heads", 0),
        ("into heads", 2),
    ]


@pytest.mark.gpu
def test_a_run_on_a_gpu() -> None:
    for row in einsum.rows_of(einsum.Heads((4, 3, 512, 256), "cuda"), L2Flush(), ()):
        assert row.failed is None
        assert row.us is not None
        assert row.us > 0
