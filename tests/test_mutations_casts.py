"""The simulator notices every way to break the kernels that cast that we could think of."""

from __future__ import annotations

import mutations_cast_rows
import mutations_cast_tiles
import pytest
from helpers import assert_caught
from thorough import one_in

from deep_gemm.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", one_in(3, mutations_cast_rows.TRIALS))
def test_the_unbroken_cast_of_rows_passes(trial: mutations_cast_rows.Trial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", one_in(3, mutations_cast_rows.MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_cast_of_rows_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, mutations_cast_rows.TRIALS)


@pytest.mark.parametrize("trial", one_in(3, mutations_cast_tiles.TRIALS))
def test_the_unbroken_cast_of_tiles_passes(trial: mutations_cast_tiles.Trial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", one_in(3, mutations_cast_tiles.MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_cast_of_tiles_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, mutations_cast_tiles.TRIALS)
