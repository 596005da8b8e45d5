"""The mutation runner, and its verdict on the simulator: broken kernels are noticed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from sim_mutations import MUTATIONS, TRIALS

from deep_gemm.sim import HostCompileError
from deep_gemm.sim.mutate import CAUGHT, DOES_NOT_COMPILE, MISSED, Mutation, report, run_mutations, score


@dataclass(frozen=True)
class TextTrial:
    """Stands in for a kernel: what its text says happens."""

    config: str = "small"

    def headers(self) -> dict[str, str]:
        return {"k.cuh": "good good fine"}

    def run(self, headers: Mapping[str, str]) -> None:
        text = headers["k.cuh"]
        if self.config in text:
            raise ValueError(f"wrong in a {self.config} kernel")
        if "crash" in text:
            os.abort()
        if "hang" in text:
            time.sleep(60)
        if "syntax" in text:
            raise HostCompileError("k.cpp:1: error: no such thing")
        if "wrong" in text:
            raise ValueError("7 of 9 elements are wrong")


def verdicts(*words: str) -> list[tuple[str, str]]:
    mutations = [Mutation(word, "k.cuh", "fine", word) for word in words]
    return [(o.verdict, o.reason) for o in run_mutations(mutations, [TextTrial()], seconds_each=20)]


def test_every_kind_of_end_has_its_verdict() -> None:
    assert verdicts("wrong", "nicer", "syntax", "crash") == [
        (CAUGHT, "7 of 9 elements are wrong"),
        (MISSED, "every trial passed"),
        (DOES_NOT_COMPILE, "k.cpp:1: error: no such thing"),
        (CAUGHT, "the process crashed with exit code -6"),
    ]


def test_a_mutation_that_never_ends_is_stopped_and_counts_as_caught() -> None:
    (outcome,) = run_mutations([Mutation("hang", "k.cuh", "fine", "hang")], [TextTrial()], seconds_each=1)
    assert outcome.verdict == CAUGHT
    assert outcome.reason == "no end after 1 s"


def test_a_mutation_meets_first_the_trials_in_which_it_shows_and_then_all_others() -> None:
    trials = [TextTrial("small"), TextTrial("large"), TextTrial("wide")]
    both, large = "small and large", "large"
    outcomes = run_mutations(
        [
            Mutation("all trials in order", "k.cuh", "fine", both),
            Mutation("large first", "k.cuh", "fine", both, shows_in="large"),
            Mutation("not where it was thought", "k.cuh", "fine", large, shows_in="wide"),
            Mutation("nowhere", "k.cuh", "fine", "nicer", shows_in="wide"),
        ],
        trials,
    )
    assert [(o.verdict, o.trial) for o in outcomes] == [(CAUGHT, 0), (CAUGHT, 1), (CAUGHT, 1), (MISSED, 3)]


def test_a_kernel_that_fails_unbroken_is_refused() -> None:
    with pytest.raises(ValueError, match="the unbroken kernel fails trial 1: wrong in a good kernel"):
        run_mutations([Mutation("m", "k.cuh", "fine", "x")], [TextTrial(), TextTrial("good")])


@pytest.mark.parametrize("old", ["absent", "good"])
def test_a_stale_or_ambiguous_mutation_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match=f"expected one '{old}' in k.cuh"):
        run_mutations([Mutation("m", "k.cuh", old, "x")], [TextTrial()])


@pytest.mark.host_compiler
def test_nearly_all_mutations_of_the_basic_kernel_are_caught() -> None:
    outcomes = run_mutations(MUTATIONS, TRIALS)
    assert not [outcome for outcome in outcomes if outcome.verdict == DOES_NOT_COMPILE], report(outcomes)
    assert score(outcomes) >= 0.95, report(outcomes)
