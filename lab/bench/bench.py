"""A value that describes one kind of measurement: each module states such a value, and tools loop over all."""

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
    """Names of the contenders to measure; empty means all."""
    is_judged: bool | None = None
    """`Case.is_judged` of the requested part; None means all."""
    processes: int | None = None


Steps = tuple[int, Callable[[Add, Announce], None]]
"""The number of steps of a run, and the function that runs them: it reports rows to `add` and steps to `announce`."""


@dataclass(frozen=True)
class Bench:
    """A kind of measurement: how to plan it, and how to print its result file."""

    name: str
    method: str
    """The text for the result file that says how times are measured."""
    plan: Callable[[Asked], Steps]
    """Plans the requested run; raises a ValueError with the reason if the run is impossible."""
    tables: Callable[[Report], Iterable[Table | str]]
    notes: Callable[[Report], Iterable[Table | str]] = lambda _: ()
    """Returns the lines to print after the failures."""
    contenders: tuple[str, ...] = ()
    """Names that --only accepts."""
    takes_shapes: bool = True
    has_parts: bool = False
    """True: --part selects among the kind's cases."""
    needs_gpu: Callable[[Asked], bool] = lambda _: True
    drawn_by: str | None = None
    """Module in this folder that draws a run. It needs matplotlib, so it is imported only for a plot."""


def planned(
    shapes_of: Callable[..., Sequence[Any]],
    measure: Callable[..., None],
    lengths: Sequence[int],
    example: str,
    chosen: Callable[[Sequence[Shape]], Sequence[Any]] = list,
) -> Callable[[Asked], Steps]:
    """Plan a module's own steps; if shapes are requested, plan the steps that `chosen` returns for them."""

    def plan(asked: Asked) -> Steps:
        if asked.shapes is None:
            steps = shapes_of(quick=asked.quick)
        else:
            steps = chosen(parse_shapes(asked.shapes, lengths, example))
        return len(steps), lambda add, announce: measure(steps, only=asked.only, add=add, announce=announce)

    return plan
