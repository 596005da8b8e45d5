"""The simulator notices every way to break the kernels that cast that we could think of."""

from __future__ import annotations

import mutations_cast_groups
import mutations_cast_routes
import mutations_cast_rows
import mutations_cast_silu
import mutations_cast_tiles
import pytest
from cast_rows_cases import Case
from helpers import assert_caught
from thorough import mutations, one_in

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


OF_ROWS = (mutations_cast_rows, mutations_cast_silu, mutations_cast_groups, mutations_cast_routes)
TRIALS = [trial for each in OF_ROWS for trial in each.TRIALS]
MUTATIONS = [(mutation, each.TRIALS) for each in OF_ROWS for mutation in each.MUTATIONS]


@pytest.mark.parametrize("trial", one_in(3, TRIALS))
def test_the_unbroken_cast_of_rows_passes(trial: Case) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize(("mutation", "trials"), mutations(MUTATIONS), ids=lambda given: getattr(given, "name", ""))
def test_a_broken_cast_of_rows_is_noticed(mutation: Mutation, trials: list[Case]) -> None:
    assert_caught(mutation, trials)


@pytest.mark.parametrize("trial", one_in(3, mutations_cast_tiles.TRIALS))
def test_the_unbroken_cast_of_tiles_passes(trial: mutations_cast_tiles.Trial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(mutations_cast_tiles.MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_cast_of_tiles_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, mutations_cast_tiles.TRIALS)
