"""The simulator notices every way to break the kernels of rows of experts that we could think of."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_routing import GATHER_MUTATIONS, GATHER_TRIALS, ROUTE_MUTATIONS, ROUTE_TRIALS, GatherTrial, RouteTrial
from thorough import mutations

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", [*ROUTE_TRIALS, *GATHER_TRIALS])
def test_the_unbroken_kernel_passes(trial: RouteTrial | GatherTrial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(ROUTE_MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_routing_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, ROUTE_TRIALS)


@pytest.mark.parametrize("mutation", mutations(GATHER_MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_sum_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, GATHER_TRIALS)
