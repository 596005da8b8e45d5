"""Every configuration, and products in callers' forms, launch the same bytes as before."""

from __future__ import annotations

import json
from typing import Any

import launches
import pytest
from launches import KINDS, digest, launches_of, of_calls, of_configurations
from public_launches import python_calls
from thorough import sample

from deep_gemm.core.jit.tensor_map import TensorMap
from deep_gemm.gemm import launch
from deep_gemm.gemm.config.tall import GemmConfig
from lab.sim.dense import DenseTrial
from lab.sim.trial import Trial

STORED: dict[str, dict[str, str]] = json.loads(launches.FILE.read_text())
MOST_CALLS = {"cold": 580, "warm": 7, "new rows": 11, "another configuration": 580}
"""The largest number of the package's functions that a call in Python may run. These numbers may only fall."""
WHERE_INTENDED = (
    "another launch than before. `python tests/lab/launches.py --against FOLDER` shows both, if FOLDER has the commit "
    "before; where it is intended, `python tests/lab/launches.py` stores the new digests"
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.kernel.name} {kind.__name__}")
def test_configurations_launch_what_they_did(kind: type[Trial]) -> None:
    configs = [config for config in kind.kernel.configs() if kind.takes(config)]
    found = {name: digest(made) for name, made in of_configurations((kind, config) for config in sample(configs))}
    for name, now in found.items():
        of, _, config = name.partition(": ")
        assert STORED[of][config] == now, f"{name}: {WHERE_INTENDED}"
    assert found


def test_public_calls_launch_what_they_did() -> None:
    for name, made in of_calls():
        of, _, case = name.partition(": ")
        assert made, name
        assert STORED[of][case] == digest(made), f"{name}: {WHERE_INTENDED}"


def test_no_configuration_and_no_call_is_without_a_digest() -> None:
    configs = {f"{kind.kernel.name}, {kind.__name__}" for kind in KINDS}
    assert {*STORED} == configs | {"H200", "H100"}
    for kind in KINDS:
        names = {config.name for config in kind.kernel.configs() if kind.takes(config)}
        assert {*STORED[f"{kind.kernel.name}, {kind.__name__}"]} == names


def wider(tensor_map: TensorMap) -> TensorMap:
    return tensor_map._replace(sizes=(tensor_map.sizes[0] + 8, *tensor_map.sizes[1:]))


@pytest.mark.parametrize("change", ["grid", "parameter", "map"])
def test_a_changed_launch_has_another_digest(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = next(config for config in DenseTrial.kernel.configs() if DenseTrial.takes(config))
    trial = DenseTrial.drawn(config, 0)
    before = launches_of(trial)
    assert launches_of(trial) == before
    if change == "grid":
        ctas = GemmConfig.ctas
        monkeypatch.setattr(GemmConfig, "ctas", lambda *given: ctas(*given) + 1)
    elif change == "parameter":
        sides: Any = vars(launch)["sides_in_words"]
        monkeypatch.setattr(launch, "sides_in_words", lambda *given: sides(*given) ^ 1)
    else:
        output_map: Any = vars(launch)["output_map"]
        monkeypatch.setattr(launch, "output_map", lambda *given: wider(output_map(*given)))
    assert digest(launches_of(trial)) != digest(before)


def test_calls_take_no_more_python_than_they_did() -> None:
    python_calls()  # the first calls import modules
    assert {name: number for name, number in python_calls().items() if number > MOST_CALLS[name]} == {}
