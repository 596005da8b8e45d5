"""The simulator notices every way that we could think of to break the kernels of what travels by collectives."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_sends import PACK_MUTATIONS, PACK_TRIALS, PLAN_MUTATIONS, PLAN_TRIALS, PackTrial, PlanTrial
from thorough import mutations

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", [*PLAN_TRIALS, *PACK_TRIALS])
def test_the_unbroken_kernel_passes(trial: PlanTrial | PackTrial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(PLAN_MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_planning_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, PLAN_TRIALS)


@pytest.mark.parametrize("mutation", mutations(PACK_MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_packing_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, PACK_TRIALS)
