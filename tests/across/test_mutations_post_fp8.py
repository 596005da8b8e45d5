"""post_rows of tokens that are FP8 already: they arrive as they are, and every way to break it is noticed."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_post_fp8 import MUTATIONS, TRIALS, PostTrial
from thorough import mutations

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", TRIALS)
def test_tokens_arrive_as_they_are(trial: PostTrial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_copy_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)
