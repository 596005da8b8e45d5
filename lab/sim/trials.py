"""The trials of every kernel, by its name: the one list of what the simulator can run."""

from __future__ import annotations

from typing import Any

from deep_gemm.core.kernel import Kernel

from . import cast_tiles
from .trial import Trial

TRIALS: tuple[type[Trial], ...] = (cast_tiles.TileTrial,)


def trial_of(kernel: Kernel[Any], config: Any) -> type[Trial]:
    """Find the trial that runs this configuration of a kernel."""
    return next(each for each in TRIALS if each.kernel is kernel and each.takes(config))
