"""`bench bf16`, what needs no GPU of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lab.bench import attention, bf16, command, yardsticks
from lab.bench.contenders import OURS
from lab.bench.layers import EAGER
from lab.bench.report import Row
from lab.bench.timing import Spread

SMALL: list[tuple[str, Any, tuple[int, ...]]] = [
    ("dense", bf16.dense, (70, 24, 16)),
    ("wgrad", bf16.wgrad, (16, 24, 40)),
    ("contiguous", bf16.contiguous, (2, 70, 24, 16)),
    ("uneven", partial(bf16.contiguous, uneven=True), (2, 100, 24, 16)),
    ("masked", bf16.masked, (3, 10, 24, 16)),
    ("along k", bf16.along_k, (2, 16, 24, 64)),
    ("along k, counted", partial(bf16.along_k, counted=True), (2, 16, 24, 40)),
    *((expr, bf16.expression(expr), (6, 8, 16, 64)) for expr in ("bmk,bnk->mn", "bhr,hdr->bhd", "bhd,hdr->bhr")),
]


@pytest.mark.parametrize(("make", "shape"), [x[1:] for x in SMALL], ids=[x[0] for x in SMALL])
def test_each_work_is_right_and_a_wrong_one_is_noticed(make: Any, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    work = make(shape, device="cpu")
    assert work.operations > 0
    assert work.bytes > 0
    assert work.error() < attention.MOST_DIFFERENCE
    for name in bf16.__dict__.copy():
        if "gemm" in name or name == "einsum":
            monkeypatch.setattr(bf16, name, lambda *_, **__: None)
    assert not work.error() < attention.MOST_DIFFERENCE


def test_kinds_and_shapes_are_those_that_deepgemm_was_timed_at() -> None:
    timed = {(row["kind"], tuple(row["shape"])) for row in yardsticks._family()["rows"]}
    own = ("bf16_contiguous_uneven", "bf16_k_grouped_counted", "einsum_bhd_hdr_bhr_planes")
    ours = {x for x in bf16.shapes_of() if x[0] not in own}
    assert {x for x in timed if x[0] in bf16.KINDS} == ours
    assert set(bf16.shapes_of(quick=True)) < set(bf16.shapes_of())


def test_a_run_has_rows_of_both_contenders_and_yardsticks(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Spread(10.0, 9.0, 11.0)
    kind = bf16.Kind(((8, 8, 8),), (), partial(bf16.dense, device="cpu"))
    monkeypatch.setattr(bf16, "KINDS", {"bf16_dense": kind})
    monkeypatch.setattr(bf16, "L2Flush", lambda: None)
    monkeypatch.setattr(attention, "cold", lambda calls, *_: dict.fromkeys(calls, (spread, ("a kernel",))))
    monkeypatch.setattr(yardsticks, "measure", lambda _: [])
    rows: list[Row] = []
    bf16.measure([("bf16_dense", (8, 8, 8))], add=rows.extend, announce=lambda _: None)
    assert [(row.contender, row.failed) for row in rows] == [(OURS, None), (EAGER, None)]


def test_shapes_may_be_new() -> None:
    assert command._casts_or_layers("bf16", False, "7,264,256")[0] == 1
    assert command._casts_or_layers("bf16", False, "32,256,7168,2048")[0] == 2
