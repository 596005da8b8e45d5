"""The simulator notices every mutation of a kernel in the lists of `tests/**/mutations_*.py`.

A list is data: `MUTATIONS` and `TRIALS`, or several pairs, such as `PLAN_MUTATIONS` and `PLAN_TRIALS`. Pairs may share
`TRIALS`. `-k "dense:"` runs the mutations of one list.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_caught
from thorough import mutations, unbroken

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler

LISTS: dict[str, list[Mutation]] = {}
TRIALS_OF: dict[str, list[Any]] = {}
"""The trials of each list, by its name. For each mutation of the list, one of these trials must notice it."""
UNBROKEN: dict[str, Any] = {}
"""Trials that the unbroken kernel must pass: one in 8 in CI, fewer elsewhere."""

for path in sorted(Path(__file__).parents[1].rglob("mutations_*.py")):
    module, stem = vars(importlib.import_module(path.stem)), path.stem.removeprefix("mutations_")
    for name in [name for name in module if name.endswith("MUTATIONS")]:
        own = name.replace("MUTATIONS", "TRIALS")
        title = f"{stem} {name.removesuffix('MUTATIONS').strip('_').lower()}".strip()
        LISTS[title], TRIALS_OF[title] = module[name], module[own if own in module else "TRIALS"]
        numbered = unbroken(8, list(enumerate(TRIALS_OF[title])))
        UNBROKEN |= {f"{title if own in module else stem} {number}": trial for number, trial in numbered}

BROKEN = {f"{title}: {each.name}": (each, title) for title, some in LISTS.items() for each in mutations(some)}


@pytest.mark.parametrize("trial", UNBROKEN)
def test_an_unbroken_kernel_passes(trial: str) -> None:
    UNBROKEN[trial].run(UNBROKEN[trial].headers())


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_noticed(name: str) -> None:
    mutation, title = BROKEN[name]
    assert_caught(mutation, TRIALS_OF[title])


def test_no_two_mutations_of_a_list_have_one_name() -> None:
    for title, some in LISTS.items():
        assert len({mutation.name for mutation in some}) == len(some), title
