"""`python -m deep_gemm bench` and `plot`: choose cases, measure, save, show."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import cases, casts, compile_times, host, machine, products, table
from .report import Report, Row
from .timing import PairingError

KINDS = ("dense", "grouped", "casts", "host", "compile")


class UsageError(Exception):
    """The request cannot be carried out; the text says why."""


def run(
    kind: str,
    *,
    quick: bool = False,
    with_sustained: bool = False,
    plot: Path | None = None,
    out: Path | None = None,
    shapes: str | None = None,
    commit: str | None = None,
) -> bool:
    """Measure, write the result file and print the tables. Tell whether all products of this package were right."""
    steps = _steps(kind, quick, with_sustained, plot, shapes)
    console = table.make_console()
    method = {"host": host.METHOD, "compile": compile_times.METHOD, "casts": casts.METHOD}.get(kind, products.METHOD)
    report = Report(machine.header(kind, method, commit))
    path = out or report.default_path()
    try:
        _measure_with_progress(report, path, console, steps)
    except (products.GpuLostError, PairingError) as error:
        report.header["stopped"] = str(error)
    report.save(path)
    table.print_report(report, console)
    console.print(f"\nwritten to {path}", markup=False)
    if plot is not None:
        plot_report(report, plot)
        console.print(f"plotted in {plot}", markup=False)
    return not report.failures() and not report.header.get("stopped")


def plot_file(file: Path, out: Path) -> None:
    """Plot a result file."""
    try:
        report = Report.load(file)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    plot_report(report, out)


def plot_report(report: Report, out: Path) -> None:
    """Plot a run."""
    _need_matplotlib()
    from .plot import draw

    try:
        draw(report, out)
    except ValueError as error:
        raise UsageError(str(error)) from error


def has_gpu() -> bool:
    """Tell whether there is a GPU to measure."""
    return torch.cuda.is_available()


def need_gpu(command: str) -> None:
    """Refuse a command that measures a GPU if there is none."""
    if not has_gpu():
        raise UsageError(f"{command} measures a GPU and found no CUDA GPU; `bench compile` runs anywhere")


Steps = tuple[int, Callable[[Callable[[list[Row]], None], Callable[[str], None]], None]]
"""How many steps a run has, and the function that does them; it takes `add` for rows and `announce` for steps."""


def _steps(kind: str, quick: bool, with_sustained: bool, plot: Path | None, shapes: str | None) -> Steps:
    """Check the request and plan it."""
    if kind not in KINDS:
        raise UsageError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if plot is not None:
        if kind not in ("dense", "grouped"):
            raise UsageError(f"--plot draws products, bench {kind} has none")
        _need_matplotlib()
    if shapes is not None and kind not in ("dense", "grouped"):
        raise UsageError(f"--shapes chooses products, bench {kind} has its own")
    if kind == "compile":
        configs = compile_times.configurations(quick)
        return len(configs), lambda add, announce: compile_times.measure(configs, add=add, announce=announce)
    try:
        asked_for = cases.parse_shapes(shapes) if shapes is not None else ()
        chosen = cases.cases_of(kind, quick=quick, shapes=asked_for)
    except ValueError as error:
        raise UsageError(str(error)) from error
    need_gpu(f"bench {kind}")
    if kind == "casts":
        return len(casts.kinds_and_shapes()), lambda add, announce: casts.measure(add=add, announce=announce)
    if kind == "host":
        return host.STEPS, lambda add, announce: host.measure(add=add, announce=announce)
    return len(chosen) * (2 if with_sustained else 1), lambda add, announce: products.measure(
        chosen, with_sustained=with_sustained, add=add, announce=announce
    )


def _measure_with_progress(report: Report, path: Path, console: Console, steps: Steps) -> None:
    total, measure = steps

    def add(rows: list[Row]) -> None:
        report.rows += rows
        report.save(path)  # after each step, so that little is lost if the run stops

    with_progress(total, console, lambda announce: measure(add, announce))


def with_progress(total: int, console: Console, work: Callable[[Callable[[str], None]], None]) -> None:
    """Do work of `total` steps and show its progress. It announces each step by name."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=total)
        started = itertools.count()

        def announce(step: str) -> None:
            progress.update(task, description=step, completed=next(started))

        work(announce)
        progress.update(task, completed=total)


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('plots need matplotlib; run: pip install "deep_gemm[plot]"')
