"""Runs trials of a broken kernel in a separate process, because the kernel may crash or never end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from lab.sim.library import HostCompileError
from lab.sim.mutate import Mutation
from lab.sim.trial import Trial

CAUGHT, MISSED, DOES_NOT_COMPILE = "caught", "missed", "does not compile"


@dataclass(frozen=True)
class Outcome:
    """The result of one mutation."""

    verdict: str
    """CAUGHT, MISSED or DOES_NOT_COMPILE."""
    reason: str
    trial: int
    """The number of the trial that noticed the mistake; if none did, the number of trials."""


def try_mutation(
    mutation: Mutation, trials: Sequence[Trial], *, first: int | None = None, seconds: float = 120
) -> Outcome:
    """Break the kernel, then run trials in a separate process until a trial notices the mistake.

    Trial `first` runs before all others. The result means something only if the unbroken kernel passes all trials.
    """
    for trial in trials:
        mutation.apply(trial.headers())
    ordered = sorted(
        enumerate(trials), key=lambda numbered: (numbered[0] != first, numbered[1].config != mutation.shows_in)
    )
    context = multiprocessing.get_context("forkserver")
    # Import the slow modules once, in the server that all these processes fork from.
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
    torch.set_num_threads(1)  # each core already runs one of these processes
    for index, trial in trials:
        try:
            trial.run(mutation.apply(trial.headers()))
        except HostCompileError as error:
            first = next((line for line in str(error).splitlines() if "error" in line), str(error)[:200])
            sender.send((DOES_NOT_COMPILE, first, index))
            return
        except Exception as error:  # any error shows that the trial noticed the mutation
            sender.send((CAUGHT, " ".join(str(error).split())[:300], index))
            return
    sender.send((MISSED, "every trial passed", len(trials)))
