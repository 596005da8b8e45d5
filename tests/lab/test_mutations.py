"""The simulator notices every way to break a kernel that the lists in `tests/*/mutations_*.py` hold."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import assert_caught
from thorough import mutations, one_in

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


class MutationList(NamedTuple):
    """Mutations, and the trials of which one must notice each."""

    name: str
    mutations: list[Mutation]
    trials: list[Any]


def lists() -> list[MutationList]:
    """Every list: X_MUTATIONS goes with X_TRIALS if the module has these, else with its TRIALS."""
    found = []
    for path in sorted(Path(__file__).parents[1].rglob("mutations_*.py")):
        module = vars(importlib.import_module(path.stem))
        for name in (name for name in module if name.endswith("MUTATIONS")):
            own = name.replace("MUTATIONS", "TRIALS")
            part = name.removesuffix("MUTATIONS").strip("_").lower()
            title = " ".join(filter(None, (path.stem.removeprefix("mutations_"), part)))
            found.append(MutationList(title, module[name], module[own if own in module else "TRIALS"]))
    return found


LISTS = lists()
UNBROKEN = {
    f"{each.name} {number}": trial
    for each in {id(each.trials): each for each in LISTS}.values()
    for number, trial in enumerate(one_in(3, each.trials))
}
BROKEN = {
    f"{each.name}: {mutation.name}": (mutation, each.trials) for each in LISTS for mutation in mutations(each.mutations)
}


@pytest.mark.parametrize("trial", UNBROKEN)
def test_an_unbroken_kernel_passes(trial: str) -> None:
    UNBROKEN[trial].run(UNBROKEN[trial].headers())


@pytest.mark.parametrize("mutation", BROKEN)
def test_a_broken_kernel_is_noticed(mutation: str) -> None:
    assert_caught(*BROKEN[mutation])


def test_no_two_mutations_of_a_list_have_one_name() -> None:
    for each in LISTS:
        assert len({mutation.name for mutation in each.mutations}) == len(each.mutations), each.name
