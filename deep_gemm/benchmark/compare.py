"""Ratios of times within one run, and to DeepGEMM by way of the peers' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cases import Shape
from .contenders import FAST, OURS
from .report import Report, Row, geometric_mean


@dataclass(frozen=True)
class Comparison:
    """One row beside the others of its run. Ratios are of times: below 1 the row is faster."""

    row: Row
    to_fast: float | None
    """To cuBLASLt's fast product at the same shape; groups have none."""
    to_deepgemm: float | None
    """To DeepGEMM, estimated: its ratio to the fast product times what that product takes in this run."""


def comparisons(report: Report, mode: str = "cold", contender: str = OURS) -> list[Comparison]:
    """Every row of a contender in a mode, beside times of the same mode."""
    fast_us = {
        (row.kind, row.shape): row.us
        for row in report.rows
        if row.us is not None and (row.contender, row.mode) == (FAST, mode)
    }
    return [_compare(row, fast_us) for row in report.rows if row.mode == mode and row.contender == contender]


def _compare(row: Row, fast_us: dict[tuple[str, Shape], float]) -> Comparison:
    beside = fast_us.get((row.kind, row.shape))  # for groups and weight gradients at `fast_shape`, in the same rounds
    fast = beside if row.kind == "dense" else None
    if beside is None and row.fast_shape:  # files of before had it as a dense row alone
        beside = fast_us.get(("dense", row.fast_shape))
    # The peers' ratios are of cold times.
    deepgemm = beside * row.deepgemm_ratio_to_fast if beside and row.deepgemm_ratio_to_fast else None
    return Comparison(
        row,
        to_fast=row.us / fast if row.us and fast else None,
        to_deepgemm=row.us / deepgemm if row.us and deepgemm and row.mode == "cold" else None,
    )


REGIMES: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("dense, m <= 128", lambda row: row.kind == "dense" and row.shape[0] <= 128),
    ("dense, m >= 128", lambda row: row.kind == "dense" and row.shape[0] >= 128),
    ("dense_1d1d", lambda row: row.kind == "dense_1d1d"),
    ("contiguous", lambda row: row.kind == "contiguous"),
    ("contiguous_uneven", lambda row: row.kind == "contiguous_uneven"),
    ("masked", lambda row: row.kind == "masked"),
    ("k_grouped", lambda row: row.kind == "k_grouped"),
)


@dataclass(frozen=True)
class Summary:
    """Geometric means over a regime."""

    regime: str
    count: int
    to_fast: float | None
    to_deepgemm: float | None
    fraction_of_floor: float | None


def summaries(compared: Sequence[Comparison]) -> list[Summary]:
    """The regimes that a run has measured."""
    found = []
    for regime, belongs in REGIMES:
        inside = [each for each in compared if belongs(each.row) and each.row.us is not None]
        if inside:
            found.append(
                Summary(
                    regime,
                    len(inside),
                    geometric_mean(each.to_fast for each in inside if each.to_fast),
                    geometric_mean(each.to_deepgemm for each in inside if each.to_deepgemm),
                    geometric_mean(each.row.fraction_of_floor for each in inside if each.row.fraction_of_floor),
                )
            )
    return found
