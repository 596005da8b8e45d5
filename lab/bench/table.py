"""Tables of a run: means of ratios, and columns. A column has a heading, and makes the cell of each line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich import box
from rich.table import Table

from .contenders import OURS
from .report import Report, Row, geometric_mean
from .yardsticks import yardsticks_of

Ratios = tuple[float | None, ...]


@dataclass(frozen=True)
class Line:
    """A line of a table: a row, all rows of the same kind and shape by contender, and DeepGEMM's estimated time."""

    row: Row
    others: Mapping[str, Row]
    upstream_us: float | None = None

    def us(self, name: str) -> float | None:
        """Return the time of a contender, or None if it has no row."""
        other = self.others.get(name)
        return None if other is None else other.us

    def over(self, us: float | None) -> float | None:
        """Divide the line's own time by another time."""
        return over(self.row.us, us)


class Column(NamedTuple):
    """A column: its heading, and a function that makes the cell of a line."""

    heading: str
    cell: Callable[[Line], str]
    is_left: bool = False


def lines_of(report: Report, contender: str = OURS, *kinds: str, mode: str = "cold") -> list[Line]:
    """Make a line for each row of a contender in one mode: for these kinds, or for all if none is named."""
    others: dict[tuple[str, tuple[int, ...]], dict[str, Row]] = {}
    for row in report.rows:
        if row.mode == mode:
            others.setdefault((row.kind, row.shape), {})[row.contender] = row
    known = yardsticks_of(report)
    return [
        Line(row, others[row.kind, row.shape], known.upstream_us(row.kind, row.shape) if known is not None else None)
        for row in report.rows
        if row.contender == contender and row.mode == mode and (not kinds or row.kind in kinds)
    ]


def table_of(title: str, columns: Iterable[Column], lines: Iterable[Line], gap: int = 2) -> Table:
    """Tabulate lines."""
    table, columns = new_table(title, gap), list(columns)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.is_left else "right")
    for line in lines:
        table.add_row(*(column.cell(line) for column in columns))
    return table


def means_of(
    keys: Sequence[str], names: Sequence[str], ratios: Iterable[tuple[tuple[str, ...], Ratios]], gap: int = 3
) -> Table:
    """Tabulate geometric means of ratios, one line for each key."""
    table = new_table("geometric means of ratios", gap)
    for heading in (*keys, "shapes", *names):
        table.add_column(heading, justify="right")
    by_key: dict[tuple[str, ...], list[Ratios]] = {}
    for key, each in ratios:
        by_key.setdefault(key, []).append(each)
    for key, of_key in by_key.items():
        columns = zip(*of_key, strict=True)
        means = (geometric_mean(each for each in column if each) for column in columns)
        table.add_row(*key, str(len(of_key)), *map(ratio, means))
    return table


def new_table(title: str, gap: int = 3) -> Table:
    """Make a table with `gap` spaces between columns."""
    padding = (0, gap - 1, 0, 0)
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False, padding=padding
    )


# Columns


def shape(heading: str, part: slice = slice(None)) -> Column:
    """Make a column of the rows' shapes, or of a part of each shape."""
    return Column(heading, lambda line: name_of(line.row.shape[part]), is_left=True)


def ours(heading: str = "us") -> Column:
    """Make a column of the lines' own times."""
    return Column(heading, lambda line: "failed" if line.row.failed else figure(line.row.us))


def time(name: str, heading: str) -> Column:
    """Make a column of a contender's times."""
    return Column(heading, lambda line: figure(line.us(name)))


def beside(name: str, heading: str) -> tuple[Column, Column]:
    """Make a column of a contender's times, and a column of the lines' own times divided by them."""
    return time(name, heading), Column("ratio", lambda line: ratio(line.over(line.us(name))))


UPSTREAM = Column("DeepGEMM", lambda line: figure(line.upstream_us))
TO_UPSTREAM = Column("ratio", lambda line: ratio(line.over(line.upstream_us)))
KIND = Column("kind", lambda line: line.row.kind, is_left=True)
TFLOPS = Column("TFLOPS", lambda line: f"{line.row.tflops:.0f}" if line.row.tflops else "")
TB_PER_S = Column(
    "TB/s", lambda line: f"{line.row.bytes / line.row.us / 1e6:.2f}" if line.row.bytes and line.row.us else ""
)


# Cells


def name_of(sizes: Iterable[object]) -> str:
    """Write a shape in short form.

    >>> name_of((64, 2112, 7168))
    '64x2112x7168'
    """
    return "x".join(map(str, sizes))


def over(us: float | None, other: float | None) -> float | None:
    """Divide a time by another; return None if either is unknown."""
    return us / other if us and other else None


def figure(us: float | None) -> str:
    """Write a time.

    >>> figure(9.876), figure(123.456), figure(None)
    ('9.88', '123.5', '')
    """
    return "" if us is None else f"{us:.2f}" if us < 100 else f"{us:.1f}"


def ratio(value: float | None) -> str:
    """Write a ratio of times: green if the line is faster, red if it is slower by more than 2%."""
    if value is None:
        return ""
    return f"[{'green' if value < 1 else 'red' if value > 1.02 else 'default'}]{value:.2f}[/]"


def percent(fraction: float | None) -> str:
    """Write a fraction in percent."""
    return "" if fraction is None else f"{fraction:.0%}"
