"""The simulator's verdict on an fp8_gemm kernel whose grouped rows are broken."""

from __future__ import annotations

import pytest
from mutations_rows import MUTATIONS, TRIALS

from deep_gemm.sim.mutate import DOES_NOT_COMPILE, report, run_mutations, score


@pytest.mark.host_compiler
def test_nearly_all_mutations_of_grouped_rows_are_caught() -> None:
    outcomes = run_mutations(MUTATIONS, TRIALS)
    print(report(outcomes))
    assert not [outcome for outcome in outcomes if outcome.verdict == DOES_NOT_COMPILE], report(outcomes)
    assert score(outcomes) >= 0.95, report(outcomes)
