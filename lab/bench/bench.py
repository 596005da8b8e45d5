"""A kind of measurement of `python -m lab bench` as a value: each module states its own, and tools loop over all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from .cases import Shape, parse_shapes
from .report import Add, Announce, Report


@dataclass(frozen=True)
class Asked:
    """A request of the command line."""

    quick: bool = False
    with_sustained: bool = False
    shapes: str | None = None
    only: tuple[str, ...] = ()
    """Contenders; none means all."""
    is_judged: bool | None = None
    """`Case.is_judged` of the requested part; None means all."""
    processes: int | None = None


Steps = tuple[int, Callable[[Add, Announce], None]]
"""How many steps a run has, and the function that does them; it takes `add` for rows and `announce` for steps."""


@dataclass(frozen=True)
class Bench:
    """A kind of measurement: how it is planned, and how its result file is printed."""

    name: str
    method: str
    """How it measures, in the words of the result file."""
    plan: Callable[[Asked], Steps]
    """Plans the requested run; raises a ValueError with the reason if it cannot run."""
    tables: Callable[[Report], Iterable[Table | str]]
    notes: Callable[[Report], Iterable[Table | str]] = lambda _: ()
    """Gives the lines behind the failures."""
    contenders: tuple[str, ...] = ()
    """Names that --only takes."""
    takes_shapes: bool = True
    has_parts: bool = False
    """--part chooses among its cases."""
    needs_gpu: Callable[[Asked], bool] = lambda _: True
    drawn_by: str | None = None
    """The module beside this one that draws it; only plots need matplotlib, so it is imported when one is drawn."""


def planned(
    shapes_of: Callable[..., Sequence[Any]],
    measure: Callable[..., None],
    lengths: Sequence[int],
    example: str,
    chosen: Callable[[Sequence[Shape]], Sequence[Any]] = list,
) -> Callable[[Asked], Steps]:
    """Plan a module's own steps or, if shapes are requested, the steps that `chosen` makes of them."""

    def plan(asked: Asked) -> Steps:
        if asked.shapes is None:
            steps = shapes_of(quick=asked.quick)
        else:
            steps = chosen(parse_shapes(asked.shapes, lengths, example))
        return len(steps), lambda add, announce: measure(steps, only=asked.only, add=add, announce=announce)

    return plan
