"""Several ranks of a node in the simulator, each with its own kernels, one after another.

Each rank's kernels run in a thread, and one thread runs at a time: every few steps it passes the turn to a rank drawn
from a seed, so runs are repeatable. In half of the runs one rank, also drawn, is slow: it starts and meets others late.
"""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .library import HostKernel, copy_of
from .simulate import KernelLaunch, Simulation

SLOW = 24
"""A slow rank gets a turn this many times less often than the others."""


def run_ranks(simulation: Simulation, launches: Sequence[Sequence[KernelLaunch]]) -> None:
    """Run the kernels of each rank in order, with all ranks at the same time. Raise the first error."""
    with tempfile.TemporaryDirectory() as directory:
        turns = _Turns(simulation, len(launches))
        of_ranks = [_with_own_models(each, Path(directory)) for each in launches]
        threads = [
            threading.Thread(target=turns.run, args=(rank, each), name=f"rank {rank}")
            for rank, each in enumerate(of_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if turns.error is not None:
            raise turns.error


def _with_own_models(launches: Sequence[KernelLaunch], directory: Path) -> list[KernelLaunch]:
    """Copy the kernels of a rank's launches, so that it shares no model with other ranks."""
    own: dict[Path, HostKernel] = {}
    for each in launches:
        if each.kernel.path not in own:
            own[each.kernel.path] = copy_of(each.kernel, directory)
    return [replace(each, kernel=own[each.kernel.path]) for each in launches]


class _Turns:
    """Passes turns between ranks."""

    def __init__(self, simulation: Simulation, ranks: int) -> None:
        self.simulation = simulation
        self.random = random.Random(simulation.seed)
        self.left = list(range(ranks))
        self.slow = self.random.randrange(2 * ranks)  # in half of the runs no rank is slow
        self.changed = threading.Condition()
        self.turn = self._draw()
        self.error: Exception | None = None

    def run(self, rank: int, launches: Sequence[KernelLaunch]) -> None:
        """Run a rank's kernels, in its thread."""
        try:
            self._wait(rank)
            for number, launched in enumerate(launches):
                if self.error is None:
                    other_ranks = lambda: self._pass_on(rank)  # noqa: E731
                    self.simulation.launch(launched, rank=rank, other_ranks=other_ranks, seed=1000 * rank + number)
                    self._pass_on(rank)
        except Exception as error:  # the main thread raises it
            self.error = self.error or error
        self.left.remove(rank)
        self._hand_over()

    def _draw(self) -> int:
        weights = [1 if rank == self.slow else SLOW for rank in self.left]
        return self.random.choices(self.left, weights)[0]

    def _pass_on(self, rank: int) -> int:
        self._hand_over()
        self._wait(rank)
        return int(self.error is not None)

    def _hand_over(self) -> None:
        if self.left:
            with self.changed:
                self.turn = self._draw()
                self.changed.notify_all()

    def _wait(self, rank: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == rank)
