"""The simulator notices every way to break the fetching of rows that we could think of."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_rows_fetched import MUTATIONS, TRIALS, FetchTrial
from thorough import mutations

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", TRIALS)
def test_the_unbroken_kernel_passes(trial: FetchTrial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_kernel_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)
