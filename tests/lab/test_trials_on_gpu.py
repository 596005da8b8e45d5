"""Trials in a GPU's memory, without a GPU: it lies on the CPU, and the driver's launches go to the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from deep_gemm.casts import lay_scales
from deep_gemm.core.jit import driver
from deep_gemm.core.kernel import Config, Kernel
from lab.__main__ import app
from lab.bench import command
from lab.bench import kernel as of_kernels
from lab.bench.timing import KernelEvent, L2Flush
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
def test_trials_of_every_kind_pass_in_the_memory_of_a_gpu(
    kind: type[Trial], driver_of_the_simulator: list[GpuMemory]
) -> None:
    config = next(config for config in kind.kernel.configs() if kind.takes(config))
    assert 0 <= kind.drawn(config, 3).on(DEVICE).run() <= 1
    assert driver_of_the_simulator


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
    for _ in range(2):
        memory.restore()
        assert not torch.equal(out, first)
        memory.launch_again()
        assert torch.equal(out, first)


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler that sees each fill, copy and launch, which takes longer by 1 us each time."""
    seen: list[KernelEvent] = []

    def see(name: str, us: float) -> None:
        seen.append(KernelEvent(name, 100.0 * len(seen), us))

    def copied(memory: GpuMemory, restore: Any = GpuMemory.restore) -> None:
        restore(memory)
        see("Memcpy DtoD (Device -> Device)", 7.0)

    def launched(memory: GpuMemory, launch_again: Any = GpuMemory.launch_again) -> None:
        launch_again(memory)
        see("lay_scales", 10.0 + sum(event.name == "lay_scales" for event in seen))

    def fill(_: object) -> None:
        see("fill", 50.0)

    def profiled(work: Any) -> list[KernelEvent]:
        seen.clear()
        work()
        return seen

    monkeypatch.setattr(GpuMemory, "restore", copied)
    monkeypatch.setattr(GpuMemory, "launch_again", launched)
    monkeypatch.setattr(L2Flush, "__init__", lambda flush: setattr(flush, "name", "fill"))
    monkeypatch.setattr(L2Flush, "__call__", fill)
    monkeypatch.setattr(of_kernels, "profiled", profiled)
    monkeypatch.setattr(of_kernels, "DEVICE", DEVICE)
    monkeypatch.setattr(command, "has_gpu", lambda: True)


@pytest.mark.usefixtures("profiler")
def test_the_launches_of_a_trial_are_timed_without_copies_and_fills() -> None:
    result = CliRunner().invoke(app, ["bench", "kernel", "lay_scales", "--set", "m=33"])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].split()[-4:] == ["19.50", "10.00", "29.00", "0"]


@pytest.mark.usefixtures("profiler")
def test_a_wrong_result_is_told_and_what_is_for_kernels_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, says in (
        (("kernel", "lay_scales", "--set", "x=1"), "set: expected one of num_sms, truncate, groups, m, "),
        (("dense", "lay_scales"), "kind: expected kernel, as lay_scales is for it, got dense"),
    ):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert (result.exit_code, says in result.output) == (2, True), result.output
    monkeypatch.setattr("lab.sim.lay_scales.run", lambda *_, **__: None)
    result = CliRunner().invoke(app, ["bench", "kernel", "lay_scales"])
    assert (result.exit_code, "words: expected" in result.output) == (1, True), result.output


def test_a_kernel_compiled_for_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel: expected None for a GPU, got lay_scales compiled for the host"):
        SCALES.on(DEVICE).check(SCALES.compiled())
