"""The commands `python -m lab bench` and `plot`: choose cases, measure, save, print."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import time
from pathlib import Path

import torch
from rich.console import Console

from deep_gemm.cli import make_console, with_progress

from . import machine
from .bench import Asked, Bench, Steps
from .benches import BENCHES, print_report
from .products import GpuLostError
from .report import Announce, Report, Row
from .timing import PairingError

PARTS = {"fitted": False, "judged": True}
"""Values of --part, and `Case.is_judged` of each."""


def judged_of(part: str | None) -> bool | None:
    """Return `Case.is_judged` of the requested part; None for all."""
    if part not in (None, *PARTS):
        raise UsageError(f"part: expected one of {', '.join(PARTS)}, got {part!r}")
    return None if part is None else PARTS[part]


class UsageError(Exception):
    """The request cannot be carried out; the text gives the reason."""


class TimeUpError(Exception):
    """The time limit of a run has passed."""


def run(
    kind: str,
    *,
    quick: bool = False,
    with_sustained: bool = False,
    plot: Path | None = None,
    out: Path | None = None,
    shapes: str | None = None,
    only: str | None = None,
    minutes: float | None = None,
    commit: str | None = None,
    part: str | None = None,
    processes: int | None = None,
) -> bool:
    """Measure, write the result file and print the tables. Return whether all results of this package were right."""
    asked = Asked(quick, with_sustained, shapes, _contenders(kind, only), judged_of(part), processes)
    steps = _steps(asked, kind, plot is not None)
    console = make_console()
    report = Report(machine.header(kind, BENCHES[kind].method, commit))
    path = out or report.default_path()
    try:
        _measure_with_progress(report, path, console, steps, minutes)
    except (GpuLostError, PairingError, TimeUpError) as error:
        report.header["stopped"] = str(error)
    report.save(path)
    print_report(report, console)
    console.print(f"\nwritten to {path}", markup=False)
    if plot is not None:
        plot_report(report, plot)
        console.print(f"plotted in {plot}", markup=False)
    return not report.failures() and not report.header.get("stopped")


def plot_file(file: Path, out: Path) -> None:
    """Plot a result file."""
    try:
        report = Report.load(file)
    except ValueError as error:
        raise UsageError(str(error)) from error
    plot_report(report, out)


def plot_report(report: Report, out: Path) -> None:
    """Plot a run."""
    _need_matplotlib()
    bench = BENCHES.get(report.kind)
    drawing = importlib.import_module(f".{(bench and bench.drawn_by) or 'plot'}", __package__)
    try:
        drawing.draw(report, out)
    except ValueError as error:
        raise UsageError(str(error)) from error


def has_gpu() -> bool:
    """Tell whether a GPU is present."""
    return torch.cuda.is_available()


WITHOUT_GPU = "`bench compile`, `bench numerics --quick` and `bench distributed --quick`"


def need_gpu(command: str, instead: str = WITHOUT_GPU) -> None:
    """Raise an error if a command needs a GPU and none is present; name the commands to run `instead`."""
    if not has_gpu():
        raise UsageError(f"{command} measures a GPU and found no CUDA GPU; these run anywhere: {instead}")


def _steps(asked: Asked, kind: str, is_drawn: bool) -> Steps:
    """Check the request and plan it."""
    bench = _bench(kind)
    if is_drawn:
        if bench.drawn_by is None:
            raise UsageError(f"--plot draws products and layers, bench {kind} has none")
        _need_matplotlib()
    if asked.shapes is not None and not bench.takes_shapes:
        raise UsageError(f"--shapes chooses products, casts and layers, bench {kind} has its own")
    if asked.is_judged is not None and (not bench.has_parts or asked.quick or asked.shapes is not None):
        having = ", ".join(name for name, each in BENCHES.items() if each.has_parts)
        raise UsageError(f"--part chooses among all cases of bench {having}; not with --quick or --shapes")
    if asked.processes is not None and kind != "distributed":
        raise UsageError(f"--processes is for bench distributed; bench {kind} runs in one")
    try:
        steps = bench.plan(asked)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if bench.needs_gpu(asked):
        need_gpu(f"bench {kind}")
    return steps


def _bench(kind: str) -> Bench:
    if kind not in BENCHES:
        raise UsageError(f"kind: expected one of {', '.join(BENCHES)}, got {kind!r}")
    return BENCHES[kind]


def _contenders(kind: str, only: str | None) -> tuple[str, ...]:
    """Return the requested contenders; an empty tuple means all."""
    if only is None:
        return ()
    known = _bench(kind).contenders
    if not known:
        having = ", ".join(name for name, bench in BENCHES.items() if bench.contenders)
        raise UsageError(f"--only chooses contenders of {having}, not of bench {kind}")
    names = tuple(filter(None, (name.strip() for name in only.split(","))))
    if not names or not set(names) <= set(known):
        raise UsageError(f"only: expected some of {', '.join(known)}, got {only!r}")
    return names


def _measure_with_progress(report: Report, path: Path, console: Console, steps: Steps, minutes: float | None) -> None:
    total, measure = steps
    begin, done = time.monotonic(), itertools.count()

    def add(rows: list[Row]) -> None:
        report.rows += rows
        report.save(path)  # after each step, so a run that stops loses little

    def work(announce: Announce) -> None:
        def announce_in_time(step: str) -> None:
            seconds, place = time.monotonic() - begin, next(done)
            if minutes is not None and seconds > minutes * 60:
                raise TimeUpError(f"{total - place} of {total} steps were left after {minutes:g} minutes")
            announce(step)
            if not console.is_terminal:  # the progress bar shows only on a terminal
                console.print(f"{seconds:6.1f} s  {place + 1:3}/{total}  {step}", markup=False)

        measure(add, announce_in_time)

    with_progress(total, console, work)


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('plots need matplotlib; run: pip install "hopper-gemm[plot]"')
