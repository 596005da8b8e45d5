"""The simulator notices every way to break an fp8_gemm_decode kernel that we could think of."""

from __future__ import annotations

import pytest
from helpers import assert_caught
from mutations_fp8_gemm_decode import MUTATIONS, TRIALS, Trial
from thorough import mutations, one_in

from lab.sim.mutate import Mutation

pytestmark = pytest.mark.host_compiler


@pytest.mark.parametrize("trial", one_in(3, TRIALS))
def test_the_unbroken_kernel_passes(trial: Trial) -> None:
    trial.run(trial.headers())


@pytest.mark.parametrize("mutation", mutations(MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_kernel_is_noticed(mutation: Mutation) -> None:
    assert_caught(mutation, TRIALS)
