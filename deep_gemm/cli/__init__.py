"""The console and the progress bar of the commands of `python -m deep_gemm`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH_WITHOUT_TERMINAL = 160


def make_console() -> Console:
    """Make a console. If the output is a file, the console does not fold tables."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def with_progress(total: int, console: Console, work: Callable[[Callable[[str], None]], None]) -> None:
    """Run `work`, which has `total` steps, and show its progress. `work` announces each step by name."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=total)
        started = itertools.count()

        def announce(step: str) -> None:
            progress.update(task, description=step, completed=next(started))

        work(announce)
        progress.update(task, completed=total)
