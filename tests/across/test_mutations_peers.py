"""The simulator notices every way that we could think of to break the kernels of a node's ranks."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_peers import GATHER_MUTATIONS, MEETING_MUTATIONS, POST_MUTATIONS, TRIALS, PeerTrial
from thorough import mutations

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", TRIALS)
def test_the_unbroken_kernels_pass(trial: PeerTrial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(MEETING_MUTATIONS), ids=lambda mutation: mutation.name)
def test_ranks_that_do_not_meet_are_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)


@pytest.mark.parametrize("mutation", mutations(POST_MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_posting_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)


@pytest.mark.parametrize("mutation", mutations(GATHER_MUTATIONS), ids=lambda mutation: mutation.name)
def test_broken_gathering_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)
