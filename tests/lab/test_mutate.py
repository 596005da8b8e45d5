"""The runner of mutations: its verdicts; the docs name every list, and every mutation finds the text that it breaks."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import host_mutations
import pytest
from mutated import CAUGHT, DOES_NOT_COMPILE, MISSED, try_mutation

from lab.sim import HostCompileError, HostKernel
from lab.sim.mutate import Mutation
from lab.sim.trial import Trial

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


@dataclass(frozen=True)
class TextTrial(Trial):
    """Stands in for a kernel's trial: the text decides how a run ends."""

    config: str = "small"

    @classmethod
    def drawn(cls, config: str, seed: int) -> TextTrial:
        return cls(config)

    def check(self, kernel: HostKernel | None = None) -> float:
        raise NotImplementedError

    def headers(self) -> dict[str, str]:
        return {"k.cuh": "good good fine"}

    def run(self, headers: Mapping[str, str] | None = None) -> float:
        text = (headers or self.headers())["k.cuh"]
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
        return 0.0


@pytest.mark.parametrize(
    ("word", "verdict", "reason"),
    [
        ("wrong", CAUGHT, "7 of 9 elements are wrong"),
        ("nicer", MISSED, "every trial passed"),
        ("syntax", DOES_NOT_COMPILE, "k.cpp:1: error: no such thing"),
        ("crash", CAUGHT, "the process crashed with exit code -6"),
    ],
)
def test_every_kind_of_end_has_its_verdict(word: str, verdict: str, reason: str) -> None:
    outcome = try_mutation(Mutation(word, "k.cuh", "fine", word), [TextTrial()], seconds=20)
    assert (outcome.verdict, outcome.reason) == (verdict, reason)


def test_a_mutation_that_never_ends_is_stopped_and_counts_as_caught() -> None:
    outcome = try_mutation(Mutation("hang", "k.cuh", "fine", "hang"), [TextTrial()], seconds=1)
    assert outcome.verdict == CAUGHT
    assert outcome.reason == "no end after 1 s"


@pytest.mark.parametrize(
    ("new", "shows_in", "verdict", "trial"),
    [
        ("small and large", None, CAUGHT, 0),
        ("small and large", "large", CAUGHT, 1),
        ("large", "wide", CAUGHT, 1),
        ("nicer", "wide", MISSED, 3),
    ],
)
def test_a_mutation_meets_first_the_trials_in_which_it_shows_and_then_all_others(
    new: str, shows_in: str | None, verdict: str, trial: int
) -> None:
    trials = [TextTrial("small"), TextTrial("large"), TextTrial("wide")]
    outcome = try_mutation(Mutation("m", "k.cuh", "fine", new, shows_in=shows_in), trials)
    assert (outcome.verdict, outcome.trial) == (verdict, trial)


@pytest.mark.parametrize("old", ["absent", "good"])
def test_a_stale_or_ambiguous_mutation_is_refused(old: str) -> None:
    with pytest.raises(ValueError, match=f"expected one '{old}' in k.cuh"):
        try_mutation(Mutation("m", "k.cuh", old, "x"), [TextTrial()])


def test_the_documentation_names_each_list_of_mutations() -> None:
    text = (ROOT / "docs" / "simulator.md").read_text()
    lists = [*TESTS.rglob("*mutations*.py")]
    assert lists
    assert [path.name for path in lists if f"`{path.relative_to(ROOT)}`" not in text] == []


@pytest.mark.parametrize("module", sorted(path.stem for path in TESTS.rglob("mutations_*.py")))
def test_every_mutation_finds_the_text_that_it_breaks(module: str) -> None:
    """CI runs a part of each list, so without this check a mutation of changed text could stay unnoticed for long."""
    lists = vars(importlib.import_module(module))
    names = [name for name in lists if name.endswith("MUTATIONS")]
    assert names
    for name in names:
        own = name.replace("MUTATIONS", "TRIALS")
        headers = [trial.headers() for trial in lists[own if own in lists else "TRIALS"]]
        for mutation in lists[name]:
            for each in headers:
                mutation.apply(each)


def test_every_mutation_of_the_host_finds_its_text() -> None:
    for mutation in host_mutations.MUTATIONS:
        mutation.text()
