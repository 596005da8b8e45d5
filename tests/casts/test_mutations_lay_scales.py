"""The simulator notices every way to break the kernel that lays scales out that we could think of."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_lay_scales import MUTATIONS, TRIALS, Trial
from thorough import mutations

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", TRIALS)
def test_the_unbroken_kernel_passes(trial: Trial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_copies_are_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)
