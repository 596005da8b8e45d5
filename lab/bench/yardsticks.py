"""Estimate DeepGEMM's time in this run: its times from another day, scaled by yardsticks timed on both days.

This run does not contain DeepGEMM; `family.json` holds its measured times. A copy shows the present speed of memory,
and torch's BF16 product the present speed of arithmetic. The file tells which yardstick scales a shape. On another GPU
than the file's, only the yardsticks are timed, and nothing is estimated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .cases import Shape
from .contenders import BF16
from .report import Report, Row
from .timing import L2Flush, Spread, cold

FAMILY_FILE = Path(__file__).with_name("family.json")
COPY, PRODUCT = "copy", "bf16_dense"
COPY_SHAPE, PRODUCT_SHAPE = (16384, 16384), (8192, 8192, 8192)
CONTENDER = {COPY: "torch", PRODUCT: BF16}
REPEATS = 15
METHOD = (
    "yardsticks: a copy of 16384 x 16384 BF16 numbers (kind copy) and torch's BF16 product of 8192 x 8192 x 8192 (kind "
    "bf16_dense), timed in this run; DeepGEMM 2.6.1 is not run: its times of another day on an H200 (family.json) are "
    "scaled by the yardstick of what limits a shape, memory or arithmetic"
)


@dataclass(frozen=True)
class Yardsticks:
    """Microseconds of both yardsticks in one run, and the full name of the run's GPU."""

    gpu: str | None
    copy_us: float
    bf16_dense_us: float

    def upstream_us(self, kind: str, shape: Sequence[int]) -> float | None:
        """Estimate DeepGEMM 2.6.1's time in this run; None on another GPU than the file's, or for an untimed shape."""
        family = _family()
        found = _times().get((kind, tuple(shape))) if self.gpu == family["gpu"] else None
        if found is None:
            return None
        us, by = found
        now = {COPY: self.copy_us, PRODUCT: self.bf16_dense_us}[by]
        return us * now / float(family["yardsticks"][by]["us"])


def measure(flush: L2Flush) -> list[Row]:
    """Time both yardsticks on the current GPU, cold and interleaved, and return their rows for a result file."""
    torch.manual_seed(0)
    source = torch.randn(COPY_SHAPE, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    a, b = (torch.randn(PRODUCT_SHAPE[:2], device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    calls = {COPY: lambda: target.copy_(source), PRODUCT: lambda: torch.mm(a, b.t(), out=out)}
    return rows_of({kind: spread for kind, (spread, _) in cold(calls, flush, REPEATS).items()})


def rows_of(spreads: dict[str, Spread]) -> list[Row]:
    """Make the rows of the yardsticks' times."""
    (rows, columns), (m, n, k) = COPY_SHAPE, PRODUCT_SHAPE
    return [
        Row(COPY, COPY_SHAPE, CONTENDER[COPY], "cold", bytes=rows * columns * 4, **asdict(spreads[COPY])),
        Row(PRODUCT, PRODUCT_SHAPE, CONTENDER[PRODUCT], "cold", operations=2 * m * n * k, **asdict(spreads[PRODUCT])),
    ]


def yardsticks_of(report: Report) -> Yardsticks | None:
    """Find both yardsticks in a result file; None if the file lacks one of the two."""
    rows: dict[tuple[str, Shape, str], Row] = {(row.kind, row.shape, row.contender): row for row in report.rows}
    found = [rows.get((kind, shape, CONTENDER[kind])) for kind, shape in ((COPY, COPY_SHAPE), (PRODUCT, PRODUCT_SHAPE))]
    copy_us, product_us = (row.us if row is not None else None for row in found)
    if not copy_us or not product_us:
        return None
    return Yardsticks(report.header["machine"]["gpu"], copy_us, product_us)


@cache
def _family() -> dict[str, Any]:
    return dict(json.loads(FAMILY_FILE.read_text()))


@cache
def _times() -> dict[tuple[str, Shape], tuple[float, str]]:
    """Return DeepGEMM's time for each kind and shape, and the name of the yardstick that scales this time."""
    return {(row["kind"], tuple(row["shape"])): (row["us"], row["by"]) for row in _family()["rows"]}
