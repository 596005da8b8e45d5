"""`bench hc`, what needs no GPU of it: operands on the CPU, times that nobody measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from test_benchmark import NoFlush

from lab.bench import command, hc, table, yardsticks
from lab.bench.contenders import OURS
from lab.bench.layers import COPY, EAGER
from lab.bench.report import Report, Row
from lab.bench.timing import Spread


def test_every_shape_that_somebody_timed_is_measured() -> None:
    timed = {tuple(row["shape"]) for row in yardsticks._family()["rows"] if row["kind"] == hc.KIND}
    assert timed
    assert timed <= set(hc.SHAPES)
    assert set(hc.shapes_of(quick=True)) < set(hc.SHAPES)


def test_shapes_are_chosen() -> None:
    measure: Any
    total, measure = command._casts_or_layers("hc", False, "13,24,7168;137,24,7168,16")
    assert total == 2
    assert measure.args == ([(13, 24, 7168, 0), (137, 24, 7168, 16)],)


@pytest.mark.parametrize("splits", [0, 4])
def test_ours_and_torch_agree(splits: int) -> None:
    p = hc.problem((5, 24, 256, splits), device="cpu")
    assert hc.difference(p) == 0
    d, sqr_sum = hc.in_torch(p)
    torch.testing.assert_close(p.d, d, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(p.sqr_sum, sqr_sum)


def test_rows_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hc, "cold", lambda calls, flush, repeats: {name: (Spread(2.0, 1.0, 3.0), (name,)) for name in calls}
    )
    flush: Any = NoFlush()
    shape = (5, 24, 256, 2)
    p = hc.problem(shape, device="cpu")
    ours, theirs, copy = hc.rows_of(shape, p, flush, ())
    assert (ours.contender, ours.failed, theirs.contender, copy.contender) == (OURS, None, EAGER, COPY)
    assert ours.bytes == 5 * 256 * 2 + 24 * 256 * 4 + 2 * 5 * 25 * 4
    monkeypatch.setattr(hc, "difference", lambda p: torch.nan)
    (wrong,) = hc.rows_of(shape, p, flush, (OURS,))
    assert wrong.failed == "wrong: difference nan"


def test_the_table_shows_what_deep_gemm_would_take() -> None:
    shape = (4096, 24, 7168, 16)
    row = Row(hc.KIND, shape, OURS, "cold", 25.0, 24.0, 26.0, operations=10**9, bytes=10**8, floor_us=21.0)
    sticks = yardsticks.rows_of({"copy": Spread(256.22, 1, 2), "bf16_dense": Spread(1400.71, 1, 2)})
    report = Report(
        {"kind": "hc", "commit": "abc", "machine": {"gpu": "NVIDIA H200", "cpu": "x"}, "stopped": None},
        [*sticks, row, replace(row, contender=EAGER, us=900.0)],
    )
    console = Console(width=160, record=True)
    table.print_report(report, console)
    text = console.export_text()
    for expected in ("4096x24x7168x16", "34.2", "0.73", "900"):
        assert expected in text
