"""The simulator notices every way to break the kernels of logits of pages that we could think of."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_fp8_paged_mqa_logits import MUTATIONS, PLAN_MUTATIONS, PLAN_TRIALS, TRIALS, PlanTrial, Trial
from thorough import mutations, one_in

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", one_in(3, [*TRIALS, *PLAN_TRIALS]))
def test_the_unbroken_kernels_pass(trial: Trial | PlanTrial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_kernel_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)


@pytest.mark.parametrize("mutation", mutations(PLAN_MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_schedule_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, PLAN_TRIALS)
