"""The simulator's verdict on a broken host: what is packed wrongly is noticed without a GPU."""

from __future__ import annotations

import pytest
from host_mutations import MUTATIONS, TRIALS, Mutation, why_noticed
from thorough import mutations


@pytest.mark.host_compiler
@pytest.mark.parametrize("trial", TRIALS)
def test_the_host_as_it_is_passes(trial: str) -> None:
    assert why_noticed(None, trial) is None


@pytest.mark.host_compiler
@pytest.mark.parametrize("mutation", mutations(MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_host_is_noticed(mutation: Mutation) -> None:
    mutation.text()
    told = [why_noticed(mutation, trial) for trial in mutation.trials]
    assert any(told), f"{mutation.trials} ran as if nothing were wrong"
