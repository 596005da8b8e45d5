"""Trials in a GPU's memory, without a GPU: it lies on the CPU, and the driver's launches go to the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu, FakeLauncher
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from typer.testing import CliRunner

from deep_gemm.casts import lay_scales
from deep_gemm.core.jit import driver
from deep_gemm.core.jit.tensor_map import TensorMap
from deep_gemm.core.kernel import Config, Kernel
from lab.__main__ import app
from lab.bench import command
from lab.bench import kernel as of_kernels
from lab.bench.timing import KernelEvent, L2Flush
from lab.kernels import all_kernels
from lab.sim.arguments import encode_tensor_map
from lab.sim.gpu import GpuMemory, kept
from lab.sim.lay_scales import ScalesTrial
from lab.sim.library import compiled
from lab.sim.simulate import KernelLaunch, Simulation
from lab.sim.trial import Trial
from lab.sim.trials import TRIALS

pytestmark = pytest.mark.host_compiler

DEVICE = "cpu:0"
"""The CPU by a name that is not the simulator's."""
ON_GPU = [kind for kind in TRIALS if not kind.needs_ranks]
SCALES = ScalesTrial.drawn(lay_scales.CONFIG, 0)


class TwoDevices(TorchFunctionMode):
    """Raises, as torch does on a GPU, if an operation takes tensors of `DEVICE` and of the host.

    Both lie on the CPU, so tensors of `DEVICE` are marked: those made or copied there, and all that is made of them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, keep the marks, and answer for a tensor's device."""
        given = list(tree_iter((args, kwargs)))
        tensors = [x for x in given if isinstance(x, Tensor)]
        marked = [hasattr(x, "is_marked") for x in tensors]
        if func == Tensor.device.__get__:
            return torch.device(DEVICE if marked[0] else "cpu")
        named = [str(x) for x in given if isinstance(x, (str, torch.device))]
        to_host, to_device = "cpu" in named or func is Tensor.cpu, DEVICE in named
        indexed = func is Tensor.__getitem__ and marked[0]  # by indices of the host too, and numbers go everywhere
        may_mix = to_host or to_device or indexed or func is Tensor.copy_
        devices = {mark for x, mark in zip(tensors, marked, strict=True) if mark or x.dim()}
        if (len(devices) > 1 and not may_mix) or (func is Tensor.numpy and marked[0]):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, got {DEVICE} and cpu")
        made = func(*args, **(kwargs or {}))
        if to_host or func is Tensor.copy_:
            return made.clone() if to_host and any(marked) else made
        for x in tree_iter(made):
            if isinstance(x, Tensor) and (to_device or any(marked)):
                x.is_marked = True  # type: ignore[attr-defined]
        return made


class InSimulator(FakeLauncher):
    """The driver's launcher of a kernel, which runs it in the simulator."""

    def __init__(self, simulation: Simulation, kernel: Kernel[Any], config: Config) -> None:
        super().__init__(FakeGpu(), kernel, config, is_dependent=False)
        self.simulation, self.host = simulation, compiled(kernel, config)

    def encode(self, tensor_map: TensorMap, address: int, tensor: int) -> bytes:
        return encode_tensor_map(tensor_map, address, tensor)

    def start(self, *_: Any) -> tuple[int]:
        params = bytes(self.params.bytes[: self.layout.size])
        self.simulation.launch(KernelLaunch.of(self.host, self.of, params, self.grid))
        return (0,)


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
        return InSimulator(simulation, kernel, config)

    monkeypatch.setattr(driver, "Launcher", launcher)
    with kept() as made:
        yield made


@pytest.mark.parametrize("kind", ON_GPU, ids=lambda kind: f"{kind.kernel.name} {kind.__name__}")
def test_trials_of_every_kind_pass_in_the_memory_of_a_gpu(
    kind: type[Trial], driver_of_the_simulator: list[GpuMemory]
) -> None:
    config = next(config for config in kind.kernel.configs() if kind.takes(config))
    with TwoDevices():
        assert 0 <= kind.drawn(config, 3).on(DEVICE).run() <= 1
    assert driver_of_the_simulator


def test_operations_on_tensors_of_two_devices_are_refused() -> None:
    with TwoDevices():
        here, there = torch.ones(2), torch.ones(2).to(DEVICE)
        assert torch.equal(there[:1].cpu() + here[:1], torch.full((1,), 2.0))
        assert there.mul(2).sub(torch.zeros(2, device=there.device)).device == torch.device(DEVICE)
        for mixed in (lambda: here + there, lambda: torch.cat((here, there.double().float())), there.numpy):
            with pytest.raises(RuntimeError, match="same device, got cpu:0 and cpu"):
                mixed()


def test_every_kernel_but_those_of_several_ranks_has_a_trial_for_a_gpu() -> None:
    missing = all_kernels().keys() - {kind.kernel.name for kind in ON_GPU}
    assert missing == {"gather_rows", "meet_ranks", "post_rows"}
    of_ranks = next(kind for kind in TRIALS if kind.kernel.name == "post_rows")
    trial = of_ranks.drawn(of_ranks.kernel.configs()[0], 0)
    assert trial.on("cpu") == trial
    with pytest.raises(ValueError, match="because post_rows needs several ranks, got cuda"):
        trial.on("cuda")


@pytest.mark.parametrize(("name", "at"), [("sf", 0), ("out", -1)])
def test_a_write_beside_the_outputs_is_found(name: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to an input, or to the byte ahead of an output."""
    result = GpuMemory.result

    def stray(memory: GpuMemory) -> Any:
        memory.arena.memory[memory.arena.spans[name].start + at] ^= 1
        return result(memory)

    monkeypatch.setattr(GpuMemory, "result", stray)
    with pytest.raises(ValueError, match=f"{name}: expected a write to outputs alone"):
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
        (("dense", "lay_scales"), "kind: expected kernel, because lay_scales belongs to it, got dense"),
    ):
        result = CliRunner().invoke(app, ["bench", *arguments])
        assert (result.exit_code, says in result.output) == (2, True), result.output
    monkeypatch.setattr("lab.sim.lay_scales.run", lambda *_, **__: None)
    result = CliRunner().invoke(app, ["bench", "kernel", "lay_scales"])
    assert (result.exit_code, "words: expected" in result.output) == (1, True), result.output


def test_a_kernel_compiled_for_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel: expected None for a GPU, got lay_scales compiled for the host"):
        SCALES.on(DEVICE).check(SCALES.compiled())
