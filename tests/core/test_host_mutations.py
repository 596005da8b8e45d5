"""The simulator notices parameters that the host packs wrongly, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
from host_mutations import MUTATIONS, TRIALS, Mutation, why_noticed
from thorough import mutations, unbroken


@pytest.mark.host_compiler
@pytest.mark.parametrize("trial", unbroken(4, list(TRIALS)))
def test_the_host_as_it_is_passes(trial: str) -> None:
    assert why_noticed(None, trial) is None


@pytest.mark.host_compiler
@pytest.mark.parametrize("mutation", mutations(MUTATIONS), ids=lambda mutation: mutation.name)
def test_a_broken_host_is_noticed(mutation: Mutation) -> None:
    is_noticed = any(why_noticed(mutation, trial) is not None for trial in mutation.trials)
    assert is_noticed, f"{mutation.trials} ran without an error"


@pytest.mark.host_compiler
def test_a_change_of_nothing_is_not_noticed_and_a_module_that_cannot_be_executed_is_no_finding() -> None:
    spaced = Mutation("spaced", "casts.lay_scales", '"stride_m":', '"stride_m" :', ("scales",))
    assert why_noticed(spaced, "scales") is None
    with pytest.raises(RuntimeError, match="expected a module that Python can import"):
        why_noticed(replace(spaced, new="!"), "scales")
