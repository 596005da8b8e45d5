"""Does the simulator notice when a kernel is wrong? Breaks its source on purpose, in many ways.

A mutation replaces one text in one header. Trials run it with some configuration, problem, seed and schedule, in a
separate process, because a broken kernel may crash or never end. A mutation that no trial notices shows a gap in the
trials or in the simulator, or a line that the kernel does not need.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from .library import HostCompileError
from .trial import Trial

CAUGHT, MISSED, DOES_NOT_COMPILE = "caught", "missed", "does not compile"


@dataclass(frozen=True)
class Mutation:
    """Replace `old` by `new` in `header`: its only occurrence, or all of them with `everywhere`.

    Trials of the configuration `shows_in` run first. This saves time if few kernels show the mutation, and changes
    nothing else: all other trials follow.
    """

    name: str
    header: str
    old: str
    new: str
    everywhere: bool = False
    shows_in: object = None

    def apply(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Give the headers with the mutation applied. A ValueError says that `old` is not there: the list is stale."""
        count = headers[self.header].count(self.old)
        if count == 0 or (count > 1 and not self.everywhere):
            raise ValueError(f"mutation {self.name!r}: expected one {self.old!r} in {self.header}, got {count}")
        return {**headers, self.header: headers[self.header].replace(self.old, self.new)}


@dataclass(frozen=True)
class Outcome:
    """The result of one mutation."""

    verdict: str
    """CAUGHT, MISSED or DOES_NOT_COMPILE."""
    reason: str
    trial: int
    """The number of the trial that noticed, or how many did not."""


def try_mutation(
    mutation: Mutation, trials: Sequence[Trial], *, first: int | None = None, seconds: float = 120
) -> Outcome:
    """Break the kernel and run trials, in a process of their own, until one notices it.

    Trial `first` runs before all others. It means something only if the unbroken kernel passes all trials.
    """
    for trial in trials:
        mutation.apply(trial.headers())
    ordered = sorted(
        enumerate(trials), key=lambda numbered: (numbered[0] != first, numbered[1].config != mutation.shows_in)
    )
    context = multiprocessing.get_context("forkserver")
    # The slow imports, once.
    context.set_forkserver_preload(["torch", "lab.sim.trials"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_trials, args=(mutation, ordered, sender))
    process.start()
    sender.close()
    verdict, number = CAUGHT, ordered[0][0]
    try:
        if receiver.poll(seconds):
            verdict, reason, number = receiver.recv()
        else:
            reason = f"no end after {seconds} s"
    except EOFError:
        process.join()
        reason = f"the process crashed with exit code {process.exitcode}"
    process.kill()
    process.join()
    return Outcome(verdict, reason, number)


def _run_trials(mutation: Mutation, trials: list[tuple[int, Trial]], sender: Connection) -> None:
    torch.set_num_threads(1)  # as many of these run as there are cores
    for index, trial in trials:
        try:
            trial.run(mutation.apply(trial.headers()))
        except HostCompileError as error:
            first = next((line for line in str(error).splitlines() if "error" in line), str(error)[:200])
            sender.send((DOES_NOT_COMPILE, first, index))
            return
        except Exception as error:  # any error means that the mutation was noticed
            sender.send((CAUGHT, " ".join(str(error).split())[:300], index))
            return
    sender.send((MISSED, "every trial passed", len(trials)))
