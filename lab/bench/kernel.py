"""The command `python -m lab bench kernel`: time the launches of one kernel or all, on trials' problems, cold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from deep_gemm.cli import make_console

from ..kernels import all_kernels, config_named, kernel_named
from ..sim.command import with_settings
from ..sim.gpu import GpuMemory, kept
from ..sim.trial import Trial
from ..sim.trials import trial_of
from .timing import LEADING_FILLS, Kernels, L2Flush, Spread, busy_us, kernels_of_calls, profiled

REPEATS = 20
LAUNCH = "launch"
DEVICE = "cuda"


def run(name: str | None, config: str | None, settings: Sequence[str]) -> bool:
    """Time a kernel, or all kernels of one GPU, and print a table. Return whether all results were right."""
    named = [kernel_named(name)] if name is not None else all_kernels().values()
    flush, console = L2Flush(), make_console()
    table = Table(box=None, pad_edge=False)
    for heading in ("kernel", "configuration", "us", "least", "most", "error"):
        table.add_column(heading, justify="left" if heading in ("kernel", "configuration") else "right")
    is_right = True
    for kernel in named:
        chosen = config_named(kernel, config)
        drawn = trial_of(kernel, chosen).drawn(chosen, 0)
        if name is None and drawn.needs_ranks:
            continue
        trial = with_settings(replace(drawn, num_sms=None), settings).on(DEVICE)
        try:
            spread, part = timed(trial, flush)
        except ValueError as error:
            is_right = False
            console.print(f"{kernel.name} {chosen.name}: {error}", markup=False)
            continue
        figures = (f"{us:.2f}" for us in (spread.us, spread.us_min, spread.us_max))
        table.add_row(kernel.name, chosen.name, *figures, f"{part:.2g}")
    console.print(table)
    return is_right


def timed(trial: Trial, flush: L2Flush) -> tuple[Spread, float]:
    """Check a trial's results, and time its launches; return the error as a fraction of the allowed error."""
    with kept() as made:
        part = trial.run()
    calls = recorded(made[0], flush)  # a second item, if any, was made by the comparison
    return Spread.of([busy_us([each for each in call if not each.name.startswith("Memcpy")]) for call in calls]), part


def recorded(memory: GpuMemory, flush: L2Flush) -> list[Kernels]:
    """Repeat the launches, each time from the original memory and with the L2 evicted."""

    def work() -> None:
        for _ in range(LEADING_FILLS):
            flush()
        for _ in range(REPEATS):
            memory.restore()
            flush()
            memory.launch_again()
        memory.restore()  # the profiler must see the same copy after every call

    return kernels_of_calls(profiled(work), flush.name, [LAUNCH] * REPEATS)[LAUNCH]
