"""Trials of every kernel as kinds of problems: `kernels`, or one kernel, such as `kernel:lay_scales`.

Here a kernel runs alone, in any configuration; the other kinds test calls, which choose configurations.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from deep_gemm.core.kernel import Kernel

from ..kernels import all_kernels
from ..sim.trial import Trial
from ..sim.trials import TRIALS, trial_of

if TYPE_CHECKING:
    from .attempt import Attempt


class OfKernel:
    """Trials of one kernel."""

    def __init__(self, kernel: Kernel[Any]) -> None:
        self.kernel, self.kind = kernel, f"kernel:{kernel.name}"

    def drawn(self, seed: str) -> Trial:
        """Draw a configuration, and a problem for it."""
        rng = random.Random(seed)
        config = rng.choice(self.kernel.configs())
        return trial_of(self.kernel, config).drawn(config, rng.getrandbits(31))

    def attempt(self, seed: str, device: str, found: Attempt) -> None:
        """Run a trial, in the simulator or on a GPU. A wrong result raises an error."""
        trial = self.drawn(seed)
        found.text, found.calls = f"{trial.config.name} {trial}", 1
        trial.on(device).run()


def kernels_on(device: str) -> tuple[OfKernel, ...]:
    """Return the kernels that run on a device; kernels of several ranks do not run on a GPU."""
    names = {kind.kernel.name for kind in TRIALS if device == "cpu" or not kind.needs_ranks}
    return tuple(OfKernel(kernel) for name, kernel in all_kernels().items() if name in names)
