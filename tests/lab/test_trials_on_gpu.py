"""Trials in a GPU's memory, without a GPU: it lies on the CPU, and the driver's launches go to the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_gemm.casts import lay_scales
from deep_gemm.core.jit import driver
from deep_gemm.core.kernel import Config, Kernel
from lab.kernels import all_kernels
from lab.sim.gpu import GpuMemory, kept
from lab.sim.launcher import Launcher
from lab.sim.lay_scales import ScalesTrial
from lab.sim.library import compiled
from lab.sim.simulate import Simulation
from lab.sim.trial import Trial
from lab.sim.trials import TRIALS

pytestmark = pytest.mark.host_compiler

DEVICE = "cpu:0"
"""The CPU by a name that is not the simulator's."""
ON_GPU = [kind for kind in TRIALS if not kind.needs_ranks]
SCALES = ScalesTrial.drawn(lay_scales.CONFIG, 0)


@pytest.fixture(autouse=True)
def driver_of_the_simulator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Launch in the simulator, on the memory that was made last."""
    sms = SimpleNamespace(multi_processor_count=6)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sms)
    monkeypatch.setattr(Kernel, "loaded", lambda kernel, config, _: (kernel, config))

    def launcher(of: tuple[Kernel[Any], Config], size: int, threads: int, cluster: int, *, is_dependent: bool) -> Any:
        kernel, config = of
        assert (size, threads) == (kernel.params_of(config).size, config.num_threads)
        assert (cluster, is_dependent) == (config.cluster_size, made[-1].is_dependent)
        simulation = Simulation({}, num_sms=made[-1].num_sms)
        simulation._arena = made[-1].arena
        return Launcher(simulation, compiled(kernel, config), kernel.params_of(config), config)

    monkeypatch.setattr(driver, "Launcher", launcher)
    with kept() as made:
        yield made


@pytest.mark.parametrize("kind", ON_GPU, ids=lambda kind: f"{kind.kernel.name} {kind.__name__}")
def test_trials_of_every_kind_pass_in_the_memory_of_a_gpu(kind: type[Trial]) -> None:
    config = next(config for config in kind.kernel.configs() if kind.takes(config))
    assert 0 <= kind.drawn(config, 3).on(DEVICE).run() <= 1


def test_every_kernel_but_those_of_several_ranks_has_a_trial_for_a_gpu() -> None:
    missing = all_kernels().keys() - {kind.kernel.name for kind in ON_GPU}
    assert missing == {"gather_rows", "meet_ranks", "post_rows"}
    of_ranks = next(kind for kind in TRIALS if kind.kernel.name == "post_rows")
    trial = of_ranks.drawn(of_ranks.kernel.configs()[0], 0)
    assert trial.on("cpu") == trial
    with pytest.raises(ValueError, match="as post_rows runs on several ranks, got cuda"):
        trial.on("cuda")


@pytest.mark.parametrize(("name", "at"), [("sf", 0), ("out", -1)])
def test_a_write_beside_the_outputs_is_found(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To an input, or to the byte ahead of an output."""
    result = GpuMemory.result

    def stray(memory: GpuMemory) -> Any:
        memory.arena.memory[memory.arena.spans[name].start + at] ^= 1
        return result(memory)

    monkeypatch.setattr(GpuMemory, "result", stray)
    with pytest.raises(ValueError, match=f"{name}: expected to be written in its outputs alone"):
        SCALES.on(DEVICE).check()


def test_launches_are_repeated(driver_of_the_simulator: list[GpuMemory]) -> None:
    SCALES.on(DEVICE).check()
    (memory,) = driver_of_the_simulator
    out = memory.arena.memory[memory.arena.spans["out"]]
    first = out.clone()
    out.view(torch.int32).view(SCALES.groups, -1)[:, : SCALES.m] = 0
    assert not torch.equal(out, first)
    for _ in range(2):
        memory.launch_again()
        assert torch.equal(out, first)


def test_a_kernel_compiled_for_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel: expected None for a GPU, got lay_scales compiled for the host"):
        SCALES.on(DEVICE).check(SCALES.compiled())
