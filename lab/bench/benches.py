"""All kinds of `python -m lab bench`, and the printing of a run."""

from __future__ import annotations

from rich.console import Console

from . import (
    attention,
    bf16,
    bf16_experts,
    casts,
    compile_times,
    distributed,
    einsum,
    experts,
    few_experts,
    fp4_experts,
    hc,
    host,
    linear,
    numerics,
    products,
    rows,
    training,
)
from .bench import Bench
from .report import Report
from .table import name_of

BENCHES: dict[str, Bench] = {
    bench.name: bench
    for bench in (
        *products.BENCHES,
        einsum.BENCH,
        casts.BENCH,
        linear.BENCH,
        rows.BENCH,
        experts.BENCH,
        fp4_experts.BENCH,
        few_experts.BENCH,
        bf16_experts.BENCH,
        attention.BENCH,
        hc.BENCH,
        bf16.BENCH,
        training.BENCH,
        distributed.BENCH,
        host.BENCH,
        compile_times.BENCH,
        numerics.BENCH,
    )
}


def print_report(report: Report, console: Console) -> None:
    """Print a run's tables, failures and notes. A file of an older command has the form of products."""
    bench, machine = BENCHES.get(report.kind, products.BENCHES[0]), report.header["machine"]
    console.print(
        f"\n{report.kind} on {machine.get('gpu') or machine['cpu']}, commit {report.header['commit']}", style="bold"
    )
    for part in bench.tables(report):
        console.print(part)
    _print_failures(report, console)
    for part in bench.notes(report):
        if isinstance(part, str):
            console.print(part, style="dim", markup=False)
        else:
            console.print(part)
    if report.header.get("stopped"):
        console.print(f"stopped: {report.header['stopped']}", style="red", markup=False)


def _print_failures(report: Report, console: Console) -> None:
    """Print each reason once, with its shapes; print failures of this package in red."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        if row.failed:
            shapes.setdefault((row.contender, row.failed), []).append(name_of(row.shape))
    ours = {row.contender for row in report.failures()}
    for (contender, why), names in shapes.items():
        style = "red" if contender in ours else "dim"
        console.print(f"no time for {contender} at {' '.join(names)}: {why}", style=style, markup=False)
