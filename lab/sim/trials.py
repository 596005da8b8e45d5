"""The trials of every kernel: all that the simulator can run, found in the modules of this folder."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from inspect import isabstract
from pathlib import Path
from typing import Any

from deep_gemm.core.kernel import Kernel

from .trial import Trial


def _found() -> Iterator[type[Trial]]:
    """Find trials. A class without its own kernel, configurations or draws is only for mutations."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.name == Path(__file__).name:
            continue
        module = importlib.import_module(f"{__package__}.{path.stem}")
        for kind in vars(module).values():
            is_own = isinstance(kind, type) and issubclass(kind, Trial) and kind.__module__ == module.__name__
            if is_own and not isabstract(kind) and vars(kind).keys() & {"kernel", "takes", "drawn"}:
                yield kind


TRIALS: tuple[type[Trial], ...] = tuple(_found())


def trial_of(kernel: Kernel[Any], config: Any) -> type[Trial]:
    """Find the trial that runs this configuration of a kernel; raise a ValueError if none does."""
    for each in TRIALS:
        if each.kernel is kernel and each.takes(config):
            return each
    raise ValueError(f"kernel: expected one with a trial in lab/sim/, got {kernel.name} {config.name}")
