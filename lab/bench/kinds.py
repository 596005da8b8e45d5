"""Kinds of work that are timed cold: their shapes, the maker of a shape's work, and checks of the contenders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.table import Table

from deep_gemm.gemm.kinds.output import Output

from . import tune, yardsticks
from .bench import Asked, Bench, Steps, planned
from .cases import Shape, floor_of
from .contenders import OURS
from .products import chosen, measure_each, raise_if_lost, reason
from .report import MAX_NAME, Add, Announce, Report, Row
from .timing import L2Flush, cold

Call = Callable[[], Any]
Verdict = tuple[float | None, str | None]
"""The error of a contender's result, and the reason if it is wrong; each may be None."""
METHOD = (
    "GPU time of all kernels of a call from torch.profiler, a 512 MB fill before each call to evict the L2, contenders "
    "of a shape interleaved in one process in rotating order, median, least and most"
)


class Work(NamedTuple):
    """The work of one shape: its size, the calls of its contenders, and checks for some contenders, by name."""

    operations: int | None
    bytes: int
    calls: Mapping[str, Call]
    checks: Mapping[str, Callable[[], Verdict]]

    @property
    def floor_us(self) -> float | None:
        """Return a lower limit of the work's time, or None without a product."""
        return None if self.operations is None else round(floor_of(self.operations, self.bytes), 3)


class Kind(NamedTuple):
    """A kind of work."""

    shapes: Sequence[Shape]
    quick: Sequence[Shape]
    make: Callable[[Shape], Work]


def within(most: float, error: float) -> Verdict:
    """Judge a difference from the right result; NaN counts as wrong."""
    return error, None if error <= most else f"wrong: difference {error:.2g}, expected at most {most}"


@dataclass(frozen=True)
class Kinds:
    """The kinds that one bench measures."""

    by_name: Mapping[str, Kind]
    repeats: int = 20
    seconds: float | None = None
    """Time limit for a shape: slow calls are repeated fewer times."""
    cool_seconds: float = 0.0
    """Pause before each shape: after a long shape a warm GPU would run the next one at a lower clock."""
    with_yardsticks: bool = True
    outputs: Sequence[Output] = ()
    """Outputs of our dense products. Kernels with these outputs are compiled beforehand, on all processors."""
    takes_new: bool = True
    """A shape that no kind lists belongs to the first kind whose shapes have the same number of sizes."""
    completed: Callable[[Shape], Shape] = lambda shape: shape
    """Completes a requested shape with sizes that may be omitted."""

    def bench(
        self,
        name: str,
        method: str,
        example: str,
        contenders: tuple[str, ...],
        tables: Callable[[Report], Iterable[Table | str]],
        lengths: Sequence[int] = (),
    ) -> Bench:
        """Make the bench of these kinds. `lengths`: allowed numbers of sizes in a shape, by default the listed ones."""
        method += f"; {yardsticks.METHOD}" if self.with_yardsticks else ""
        return Bench(name, f"{name}: {METHOD}; {method}", self.plan(example, lengths), tables, contenders=contenders)

    def plan(self, example: str, lengths: Sequence[int] = ()) -> Callable[[Asked], Steps]:
        """Plan the listed shapes, or given shapes in the form of the example."""
        lengths = lengths or sorted({len(shape) for _, shape in self.shapes_of()})
        return planned(self.shapes_of, self.measure, lengths, example, self.chosen)

    def shapes_of(self, *, quick: bool = False) -> list[tuple[str, Shape]]:
        """List the shapes to measure, each with the name of its kind."""
        return [
            (name, shape) for name, kind in self.by_name.items() for shape in (kind.quick if quick else kind.shapes)
        ]

    def chosen(self, shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
        """Return each of these shapes with the name of every kind that lists the shape."""
        found, new = [], {}
        for name, shape in reversed(self.shapes_of()):
            new[len(shape)] = name
        for shape in map(self.completed, shapes):
            listed = [each for each in self.shapes_of() if each[1] == shape]
            if not listed and not self.takes_new:
                raise ValueError(f"shapes: expected listed shapes, got {','.join(map(str, shape))!r}")
            found += listed or [(new[len(shape)], shape)]
        return found

    def measure(
        self, steps: Sequence[tuple[str, Shape]], *, only: Sequence[str] = (), add: Add, announce: Announce
    ) -> None:
        """Time the yardsticks, and these kinds at these shapes."""
        configs = dict.fromkeys(chosen(shape, output) for _, shape in steps for output in self.outputs)
        tune.compile_all([config for config in configs if config is not None], lambda _: None)
        flush = L2Flush()
        if self.with_yardsticks:
            add(yardsticks.measure(flush))
        measure_each(
            steps,
            lambda kind, shape: self.rows_of(kind, shape, self.by_name[kind].make(shape), flush, only),
            add,
            announce,
        )

    def rows_of(self, kind: str, shape: Shape, work: Work, flush: L2Flush, only: Sequence[str] = ()) -> list[Row]:
        """Check and time the contenders of a work. If a contender fails, its row holds the reason."""
        calls: dict[str, Call] = {}
        failed: dict[str, str] = {}
        for name, call in work.calls.items():
            if only and name not in only:
                continue
            try:
                call()
                calls[name] = call
            except Exception as exception:
                raise_if_lost(exception)
                failed[name] = reason(exception)
        verdicts = {name: check() for name, check in work.checks.items() if name in calls}
        time.sleep(self.cool_seconds)
        of_all: dict[str, Any] = {"operations": work.operations, "bytes": work.bytes, "floor_us": work.floor_us}
        rows = []
        for name, (spread, kernels) in (cold(calls, flush, self._repeats(work)) if calls else {}).items():
            error, wrong = verdicts.get(name, (None, None))
            more = {"kernels": tuple(kernel[:MAX_NAME] for kernel in kernels), **asdict(spread), **of_all}
            rows.append(Row(kind, shape, name, "cold", error=error, failed=wrong, **more))
        return rows + [Row(kind, shape, name, "cold", failed=why, **of_all) for name, why in failed.items()]

    def _repeats(self, work: Work) -> int:
        if self.seconds is None or work.floor_us is None:
            return self.repeats
        return max(3, min(self.repeats, int(self.seconds / max(work.floor_us * 1e-6, 1e-6))))


def of_ours(error: Callable[[], float], most: float) -> dict[str, Callable[[], Verdict]]:
    """Check our result by its difference from the right result."""
    return {OURS: lambda: within(most, error())}
