"""Every kernel of the package has trials in the simulator, and computes the problems that they draw correctly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from thorough import up_to
from typer.testing import CliRunner

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.kernel import Kernel
from deep_gemm.kernels import KERNELS
from lab.__main__ import app
from lab.sim import trials
from lab.sim.trial import Trial
from lab.sim.trials import TRIALS


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_each_configuration_has_one_trial(kernel: Kernel[Any]) -> None:
    kinds = [kind for kind in TRIALS if kind.kernel is kernel]
    taken = {config.name: [kind.__name__ for kind in kinds if kind.takes(config)] for config in kernel.configs()}
    assert {name: kinds for name, kinds in taken.items() if len(kinds) != 1} == {}


def test_a_configuration_without_a_trial_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "TRIALS", ())
    result = CliRunner().invoke(app, ["sim", "lay_scales"])
    assert result.exit_code == 2
    assert "kernel: expected one with a trial in lab/sim/, got lay_scales" in result.output


def taken_by(kind: type[Trial]) -> Sequence[Any]:
    """Return a few configurations of a kind of trial, from all parts of the list."""
    configs = [config for config in kind.kernel.configs() if kind.takes(config)]
    return configs[:: ceil_div(len(configs), up_to(3, 1))]


FEW = [(kind, config) for kind in TRIALS for config in taken_by(kind)]


@pytest.mark.host_compiler
@pytest.mark.parametrize("drawn", FEW, ids=lambda drawn: f"{drawn[0].__name__} {drawn[1].name}")
def test_what_a_trial_draws_is_computed_right(drawn: tuple[type[Trial], Any]) -> None:
    kind, config = drawn
    for seed in range(up_to(2, 1)):
        trial = kind.drawn(config, seed)
        assert 0 <= trial.run() <= 1
        assert trial == kind.drawn(config, seed)
        assert trial != kind.drawn(config, seed + 1)
