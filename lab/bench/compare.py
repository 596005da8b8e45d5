"""Ratios of times: to rivals in the same run, and to DeepGEMM as measured elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from . import table
from .cases import KINDS, Shape
from .contenders import BF16, BLOCKWISE, FAST, OURS
from .peers import DEEPGEMM, deepgemm_ratio_to_fast
from .report import Report, Row, geometric_mean


@dataclass(frozen=True)
class Comparison:
    """One row compared with other rows of its run. Ratios are of times: below 1 the row is faster."""

    row: Row
    to_fast: float | None
    """Ratio to cuBLASLt's fast product at the same shape; None for groups."""
    to_deepgemm: float | None
    """Ratio to DeepGEMM in the same run. Without such a row, the ratio to an estimate: DeepGEMM's measured ratio to the
    fast product on this GPU, times the fast product's time in this run."""


def comparisons(report: Report, mode: str = "cold") -> list[Comparison]:
    """Compare each of our rows in a mode with times of the same mode."""
    times = {(row.contender, row.kind, row.shape): row.us for row in report.rows if row.us and row.mode == mode}
    gpu = report.header["machine"].get("gpu")
    return [_compare(row, times, gpu) for row in report.rows if row.mode == mode and row.contender == OURS]


def _compare(row: Row, times: dict[tuple[str, str, Shape], float], gpu: str | None) -> Comparison:
    yardstick = times.get((FAST, row.kind, row.shape))  # for groups and weight gradients the time at `fast_shape`
    fast = yardstick if row.kind == "dense" else None
    if yardstick is None and row.fast_shape:  # older files hold this time only in a dense row
        yardstick = times.get((FAST, "dense", row.fast_shape))
    deepgemm = times.get((DEEPGEMM, row.kind, row.shape))
    if deepgemm is None and row.mode == "cold":  # peers were measured cold
        ratio = deepgemm_ratio_to_fast(gpu, row.kind, row.shape)
        deepgemm = yardstick * ratio if yardstick and ratio else None
    return Comparison(
        row,
        to_fast=row.us / fast if row.us and fast else None,
        to_deepgemm=row.us / deepgemm if row.us and deepgemm else None,
    )


def _regime(kind: str, *, is_judged: bool, least: int = 0, most: int | None = None) -> Callable[[Row], bool]:
    """Return a test for rows of one kind and one part (judged or not) whose first size is within these limits."""

    def belongs(row: Row) -> bool:
        is_of_part = row.kind == kind and (row.is_judged is True) == is_judged
        return is_of_part and least <= row.shape[0] and (most is None or row.shape[0] <= most)

    return belongs


GROUPED = KINDS[2:]
REGIMES: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("dense, m <= 128", _regime("dense", is_judged=False, most=128)),
    ("dense, m >= 128", _regime("dense", is_judged=False, least=128)),
    ("dense_1d1d", _regime("dense_1d1d", is_judged=False)),
    *((kind, _regime(kind, is_judged=False)) for kind in GROUPED),
    ("judged, m <= 128", _regime("dense", is_judged=True, most=128)),
    ("judged, m > 128", _regime("dense", is_judged=True, least=129)),
    ("judged, dense", _regime("dense", is_judged=True)),
    *((f"judged, {kind}", _regime(kind, is_judged=True)) for kind in GROUPED),
)


@dataclass(frozen=True)
class Summary:
    """Geometric means of the ratios over a regime."""

    regime: str
    count: int
    to_fast: float | None
    to_deepgemm: float | None
    fraction_of_floor: float | None
    worst: Comparison | None
    """The case with the largest ratio to cuBLASLt's fast product."""


def summaries(compared: Sequence[Comparison]) -> list[Summary]:
    """Summarize each regime that a run has measured."""
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
                    max((each for each in inside if each.to_fast), key=lambda each: each.to_fast or 0.0, default=None),
                )
            )
    return found


NOTE = (
    "Ratios are of times: below 1.00 deep_gemm is faster. DeepGEMM* is an estimate: its measured ratio to cuBLASLt "
    "fast\non this model of GPU times what cuBLASLt fast took here. floor: the larger of operations at 1640 TFLOPS and "
    "moving\nthe bytes once, on an H200."
)


def tables(report: Report) -> Iterator[Table]:
    """Tabulate the products of each measured mode."""
    for mode in ("cold", "sustained"):
        found = {(each.row.kind, each.row.shape): each for each in comparisons(report, mode)}
        if found:
            yield table.table_of(mode, _columns(found), table.lines_of(report, mode=mode), gap=3)


def _columns(found: Mapping[tuple[str, Shape], Comparison]) -> list[table.Column]:
    def of(line: table.Line) -> Comparison:
        return found[line.row.kind, line.row.shape]

    return [
        table.Column("m x n x k", lambda line: _name(line.row), is_left=True),
        table.Column("config", lambda line: line.row.config or "", is_left=True),
        table.ours(),
        table.Column("spread", lambda line: table.percent(_spread(line.row))),
        table.TFLOPS,
        table.Column("/ fast", lambda line: table.ratio(of(line).to_fast)),
        table.Column("/ DeepGEMM*", lambda line: table.ratio(of(line).to_deepgemm)),
        table.Column("of floor", lambda line: table.percent(line.row.fraction_of_floor)),
        table.Column("error", lambda line: f"{line.row.error:.1e}" if line.row.error is not None else ""),
        table.time(FAST, "fast us"),
        table.time(BLOCKWISE, "block us"),
        table.time(BF16, "bf16 us"),
    ]


def _name(row: Row) -> str:
    name = table.name_of(row.shape)
    return name if row.kind == "dense" else f"{row.kind} {name}"


def _spread(row: Row) -> float | None:
    return (row.us_max - row.us_min) / row.us if row.us and row.us_min and row.us_max else None


def notes(report: Report) -> list[Table | str]:
    """Tabulate means of cold products by regime, and add a note that explains the figures."""
    found = table.new_table("geometric means")
    found.add_column("regime")
    for heading in ("shapes", "/ fast", "/ DeepGEMM*", "of floor", "worst / fast"):
        found.add_column(heading, justify="right")
    found.add_column("at")
    for each in summaries(comparisons(report)):
        ratios = table.ratio(each.to_fast), table.ratio(each.to_deepgemm)
        worst = each.worst and (table.ratio(each.worst.to_fast), table.name_of(each.worst.row.shape))
        cells = str(each.count), *ratios, table.percent(each.fraction_of_floor), *(worst or ("", ""))
        found.add_row(each.regime, *cells)
    return [found, NOTE] if found.row_count else []
