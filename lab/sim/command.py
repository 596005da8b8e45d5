"""The command `python -m lab sim`: run trials of any kernel from many seeds, with progress."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from rich.console import Console
from rich.progress import track

from deep_gemm.core.kernel import Kernel

from . import trials as of_kernels
from .simulate import SimulationError
from .trial import Trial

SECONDS_BETWEEN_LINES = 5
"""Seconds between lines of progress, if the output is not a terminal."""


def run(kernel: Kernel[Any], config: Any, again: str, settings: Sequence[str], *, seeds: int, first_seed: int) -> bool:
    """Run a kernel's trials from many seeds; print the first failure and the command that repeats it, or a summary.

    `again` is the command line without seeds; `settings` are fields of the trial, as NAME=VALUE.
    """
    console, kind = Console(highlight=False), of_kernels.trial_of(kernel, config)
    trials = [with_settings(kind.drawn(config, seed), settings) for seed in range(first_seed, first_seed + seeds)]
    with console.status("compiling"):
        compiled = trials[0].compiled(trials[0].headers())
    console.print(f"{kernel.name} {config.name}")
    begin, worst = time.perf_counter(), 0.0
    told = begin
    for done, trial in enumerate(track(trials, description="seeds", console=console, transient=True), 1):
        try:
            worst = max(worst, trial.check(compiled))
        except (SimulationError, ValueError, AssertionError) as error:
            what = error.what if isinstance(error, SimulationError) else str(error)
            once_more = f"python -m lab {again} --first-seed {trial.seed} --seeds 1"
            console.print(f"{trial}\n{what}\nagain: {once_more}", soft_wrap=True, markup=False)
            return False
        now = time.perf_counter()
        if not console.is_terminal and now - told >= SECONDS_BETWEEN_LINES:  # the progress bar shows only on a terminal
            console.print(f"{now - begin:6.1f} s  {done:3}/{seeds}  seed {trial.seed} passed")
            told = now
    seconds = time.perf_counter() - begin
    how = f"within {worst:.2g} of the rounding that is allowed" if worst else "to the bit"
    shown = f"{seeds} of {seeds} seeds, each with its own numbers and order of warps, gave the right result {how}"
    console.print(f"{shown}, in {seconds:.1f} s.", soft_wrap=True)
    return True


def with_settings(trial: Trial, settings: Sequence[str]) -> Trial:
    """Set fields of a trial from the command line. A value is a Python literal if it can be parsed, else text."""
    names = [field.name for field in fields(trial) if field.name not in ("config", "seed", "device")]
    values = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name not in names:
            raise ValueError(f"set: expected one of {', '.join(names)}, got {name}")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return replace(trial, **values)
