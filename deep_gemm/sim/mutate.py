"""Does the simulator notice when a kernel is wrong? Breaks its source on purpose, in many ways, and counts.

A mutation replaces one text in one header. Trials run it with some configuration, problem, seed and schedule, in a
separate process, because a broken kernel may crash or never end. A mutation that no trial notices shows a gap in the
trials or in the simulator, or a line that the kernel does not need.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from .library import HostCompileError

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


class Trial(Protocol):
    """One way to run the kernel. Trials travel to other processes, so they must be picklable."""

    @property
    def config(self) -> Any:
        """The configuration, to be compared with `Mutation.shows_in`."""

    def headers(self) -> Mapping[str, str]:
        """Give the kernel's headers for this trial's configuration."""

    def run(self, headers: Mapping[str, str]) -> None:
        """Compile and simulate; raise whatever is wrong."""


@dataclass(frozen=True)
class Outcome:
    """The result of one mutation."""

    name: str
    verdict: str
    """CAUGHT, MISSED or DOES_NOT_COMPILE."""
    reason: str
    trial: int
    """Index of the trial that noticed; if none did, how many ran."""
    seconds: float


def run_mutations(
    mutations: Sequence[Mutation], trials: Sequence[Trial], *, seconds_each: float = 120
) -> list[Outcome]:
    """Try every mutation until a trial notices it. The unbroken kernel must pass all trials first."""
    for headers in [trial.headers() for trial in trials]:
        for mutation in mutations:
            mutation.apply(headers)
    numbered = list(enumerate(trials))
    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(lambda trial: _in_a_process(None, [trial], seconds_each), numbered):
            if outcome.verdict != MISSED:
                raise ValueError(f"the unbroken kernel fails trial {outcome.trial}: {outcome.reason}")

        def one(mutation: Mutation) -> Outcome:
            first = sorted(numbered, key=lambda trial: trial[1].config != mutation.shows_in)
            return _in_a_process(mutation, first, seconds_each)

        return list(pool.map(one, mutations))


def report(outcomes: Sequence[Outcome]) -> str:
    """Give a line for each mutation, and the score."""
    lines = [
        f"{outcome.verdict:17}{outcome.name} ({outcome.seconds:.1f} s, trial {outcome.trial}): {outcome.reason}"
        for outcome in outcomes
    ]
    return "\n".join([*lines, f"caught {score(outcomes):.0%} of those that compile"])


def score(outcomes: Sequence[Outcome]) -> float:
    """Give the share of mutations caught among those that compile."""
    compiled = [outcome for outcome in outcomes if outcome.verdict != DOES_NOT_COMPILE]
    return sum(outcome.verdict == CAUGHT for outcome in compiled) / max(len(compiled), 1)


def _in_a_process(mutation: Mutation | None, trials: list[tuple[int, Trial]], seconds: float) -> Outcome:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "deep_gemm.sim.dense"])  # the slow imports, once
    start = time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_mutation, args=(mutation, trials, sender))
    process.start()
    sender.close()
    verdict, trial = CAUGHT, trials[0][0]
    try:
        if receiver.poll(seconds):
            verdict, reason, trial = receiver.recv()
        else:
            reason = f"no end after {seconds} s"
    except EOFError:
        process.join()
        reason = f"the process crashed with exit code {process.exitcode}"
    process.kill()
    process.join()
    return Outcome(mutation.name if mutation else "unbroken", verdict, reason, trial, time.monotonic() - start)


def _try_mutation(mutation: Mutation | None, trials: list[tuple[int, Trial]], sender: Connection) -> None:
    torch.set_num_threads(1)  # these processes already use the cores
    for index, trial in trials:
        try:
            trial.run(mutation.apply(trial.headers()) if mutation else trial.headers())
        except HostCompileError as error:
            sender.send((DOES_NOT_COMPILE, _first_error(str(error)), index))
            return
        except Exception as error:  # any error means that the mutation was noticed
            sender.send((CAUGHT, " ".join(str(error).split())[:300], index))
            return
    sender.send((MISSED, "every trial passed", len(trials)))


def _first_error(log: str) -> str:
    return next((line for line in log.splitlines() if "error" in line), log[:200])
