"""Run every kernel on a GPU by its trials, in configurations with each value of each setting, or in all of them.

Problems are small, and trials use few SMs, so that each CTA computes several tiles.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from thorough import sample, up_to

from lab.sim.trial import Trial
from lab.sim.trials import TRIALS

pytestmark = pytest.mark.gpu


def taken_by(kind: type[Trial]) -> Sequence[Any]:
    """Return the configurations that this kind of trial runs."""
    return sample([config for config in kind.kernel.configs() if kind.takes(config)])


ON_GPU = {kind: taken_by(kind) for kind in TRIALS if not kind.needs_ranks}


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """Compile all kernels that the selected tests need, on all processors at once."""
    here = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    kinds: list[Any] = [item.callspec.params["kind"] for item in here]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        built = [pool.submit(kind.kernel.build, config) for kind in kinds for config in ON_GPU[kind]]
    for each in built:
        each.result()


@pytest.mark.parametrize("kind", ON_GPU, ids=lambda kind: f"{kind.kernel.name}-{kind.__name__}")
def test_what_a_trial_draws_is_computed_right(kind: type[Trial]) -> None:
    wrong = []
    for config in ON_GPU[kind]:
        for seed in range(up_to(4, 2)):
            trial = kind.drawn(config, seed).on("cuda")
            try:
                assert 0 <= trial.run() <= 1
            except (ValueError, AssertionError) as error:
                wrong.append(f"{config.name}: {trial}: {error}")
    assert wrong == []
