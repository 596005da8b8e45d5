"""`bench attention`, what needs no GPU of it: operands on the CPU, times that nobody measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from test_benchmark import NoFlush

from lab.bench import attention, logits_paged, logits_prefill, table, yardsticks
from lab.bench.contenders import OURS
from lab.bench.layers import EAGER
from lab.bench.report import Report, Row
from lab.bench.timing import Spread

SMALL = (5, 40, 16, 32)


def test_every_shape_that_somebody_timed_is_measured() -> None:
    measured = set(attention.shapes_of())
    timed = {(row["kind"], tuple(row["shape"])) for row in yardsticks._family()["rows"]}
    assert {each for each in timed if each[0] in attention.KINDS} <= measured
    assert set(attention.shapes_of(quick=True)) < measured


def test_shapes_are_chosen() -> None:
    assert attention.chosen([(2048, 32768, 64, 128)]) == [
        ("mqa_logits", (2048, 32768, 64, 128)),
        ("mqa_logits_clean", (2048, 32768, 64, 128)),
    ]
    assert attention.chosen([SMALL]) == [("mqa_logits", SMALL)]


@pytest.mark.parametrize("clean", [False, True])
def test_ours_and_torch_agree(clean: bool) -> None:
    p = logits_prefill.causal_problem(SMALL, clean=clean, device="cpu")
    assert logits_prefill.difference(p) < 1e-9
    in_range = torch.arange(40) < p.ends[:, None]
    ours, theirs = p.logits[in_range], logits_prefill.in_torch(p)[in_range]
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.5)


def test_shapes_that_nobody_lists_are_told_by_their_numbers() -> None:
    assert attention.chosen([(3, 2, 16, 32, 100)]) == [("paged_mqa_logits", (3, 2, 16, 32, 100))]
    assert attention.chosen([(3, 2, 100)]) == [("paged_metadata", (3, 2, 100))]


def test_logits_of_pages_are_made_and_checked() -> None:
    logits = logits_paged.paged_mqa_logits((3, 2, 16, 32, 100), device="cpu")
    assert logits.error() < 1e-12
    assert logits_paged.metadata((3, 2, 1000), device="cpu").error() == 0
    contexts = logits_paged.contexts_of((16, 2, 64, 128, 8192), device="cpu")
    assert abs(float(contexts[:, 1].float().mean()) - 8192) < 1
    assert 0.69 * 8192 < int(contexts.min()) < int(contexts.max()) < 1.31 * 8192
    timed = logits_paged.contexts_of((1, 1, 64, 128, 8192), device="cpu")
    assert timed.tolist() == [[8347]] or timed.tolist() == [[8346]]


def test_rows_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention, "cold", lambda calls, flush, repeats: {name: (Spread(2.0, 1.0, 3.0), (name,)) for name in calls}
    )
    logits = logits_prefill.mqa_logits(SMALL, device="cpu")
    assert logits.operations == 2 * 16 * 32 * (36 + 37 + 38 + 39 + 40)
    flush: Any = NoFlush()
    ours, theirs = attention.rows_of("mqa_logits", SMALL, logits, flush, ())
    assert (ours.contender, ours.failed, theirs.contender) == (OURS, None, EAGER)
    (wrong,) = attention.rows_of("mqa_logits", SMALL, logits._replace(error=lambda: torch.nan), flush, (OURS,))
    assert wrong.failed == "wrong: difference nan"


def test_the_table_shows_what_deep_gemm_would_take() -> None:
    shape = (2048, 8192, 64, 128)
    row = Row("mqa_logits", shape, OURS, "cold", 200.0, 199.0, 201.0, operations=10**12, bytes=10**8, floor_us=150.0)
    sticks = yardsticks.rows_of({"copy": Spread(256.22, 1, 2), "bf16_dense": Spread(1400.71, 1, 2)})
    report = Report(
        {"kind": "attention", "commit": "abc", "machine": {"gpu": "NVIDIA H200", "cpu": "x"}, "stopped": None},
        [*sticks, row, replace(row, contender=EAGER, us=900.0)],
    )
    console = Console(width=160, record=True)
    table.print_report(report, console)
    text = console.export_text()
    for expected in ("2048x8192x64x128", "224.6", "0.89", "900", "5000"):
        assert expected in text
