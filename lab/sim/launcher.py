"""Replaces the driver: a plan launches a kernel in the simulator as it would on a GPU.

The simulator therefore gets the same parameter bytes and the same grid as a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypedDict, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.jit.driver import ParamsBuffer
from deep_gemm.core.jit.tensor_map import TensorMap
from deep_gemm.core.kernel import Config, Kernel, launch
from deep_gemm.core.params import Params
from deep_gemm.core.shadow import launching_into

from .arguments import encode_tensor_map
from .gpu import GpuMemory
from .library import HostKernel
from .library import compiled as compiled_for_host
from .simulate import Buffer, KernelLaunch, Result, Simulation

_CPU = -1
"""The device index of CPU tensors."""
Problem = TypeVar("Problem", bound=Any)


def flat_memory(x: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, including padding between rows."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,))


class Launcher:
    """The simulator's counterpart of `jit.driver.Launcher`."""

    def __init__(
        self,
        simulation: Simulation,
        compiled: HostKernel,
        params: Params,
        config: Config,
        inputs: frozenset[str] = frozenset(),
    ) -> None:
        """`inputs`: writable buffers that this kernel must not write."""
        self.simulation, self.kernel = simulation, compiled
        self.params, self._size = ParamsBuffer(params.size), params.size
        self.lock = threading.Lock()
        self.plan: object = None
        self.stream: int | None = None
        self.config = self.function = self.pointers = None
        self.success = 0
        self._fixed: dict[str, Any] = {
            "threads": config.num_threads,
            "shared_bytes": config.shared_bytes,
            "cluster_size": config.cluster_size,
            "inputs": inputs,
        }
        self.grid = 0

    def encode(self, tensor_map: TensorMap, address: int, tensor: int) -> bytes:
        """Encode a map in the simulator's format."""
        return encode_tensor_map(tensor_map, address, tensor)

    def keeps_addresses(self) -> bool:
        """Say yes: a map's first word is its address."""
        return True

    def hold(self, plan: object, template: bytes, grid: int) -> None:
        """Switch to the parameters and the grid of another plan."""
        self.params.bytes[: len(template)] = template
        self.plan, self.grid = plan, grid

    def set_stream(self, stream: int) -> None:
        """Note the stream, which is always the same."""
        self.stream = stream

    def current_stream(self, device: int) -> int:
        """Give the only stream."""
        return 0

    def is_capturing(self) -> bool:
        """Tell that there are no graphs."""
        return False

    def current_device(self) -> int:
        """Give the device of CPU tensors."""
        return _CPU

    def start(self, config: None, function: None, pointers: None, extra: int) -> tuple[int]:
        """Run the kernel."""
        params = bytes(self.params.bytes[: self._size])
        self.simulation.launch(KernelLaunch(self.kernel, [params], grid=self.grid, **self._fixed))
        return (0,)

    def start_again(self, status: int, device: int) -> NoReturn:
        """Do nothing: it is never called, because the simulator raises its errors itself."""
        raise AssertionError(status)


class _Into(NamedTuple):
    """A stage as the target of launches."""

    stage: Stage
    compiled: dict[Kernel[Any], HostKernel | None]
    inputs: frozenset[str]

    def launch(
        self, kernel: Kernel[Any], config: Any, values: Mapping[str, Any], grid: int, device: int, is_dependent: bool
    ) -> None:
        """Launch a kernel on the stage."""
        is_last = kernel is [*self.compiled][-1]
        launcher = self.stage.launcher(kernel, self.compiled[kernel], config, frozenset() if is_last else self.inputs)
        launch(launcher, kernel.packed(config, values, launcher.encode), grid, self.stage.device)

    def room(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """Refuse: all memory of a stage was stated."""
        raise AssertionError(shape)


class How(TypedDict, total=False):
    """Settings of a simulation: keywords that functions which run a kernel pass on."""

    num_sms: int | None
    """None: as many as two clusters have CTAs."""
    seed: int
    schedule: str | None
    truncate: bool
    """WGMMA accumulates with Hopper's few bits."""
    device: str
    """`cpu`: the simulator, as everywhere unless said. `cuda`: a GPU, for which only the number of SMs counts."""


def is_on_gpu(how: How) -> bool:
    """Tell whether kernels run on a GPU, whose tensor cores keep fewer bits than the simulator."""
    return how.get("device", "cpu") != "cpu"


class Stage:
    """Tensors in the memory of a GPU, a simulated one unless said, where kernels run on them one after another."""

    def __init__(
        self,
        config: Config,
        read: Mapping[str, Tensor | None],
        written: Mapping[str, Tensor | None],
        aligned: Mapping[str, int] | None = None,
        *,
        ready: Collection[str] = (),
        ranks: Mapping[str, int] | None = None,
        **how: Unpack[How],
    ) -> None:
        """Copy tensors there. They begin at multiples of their elements, those in `aligned` at multiples of more.

        `config` is of the kernel with the largest clusters. All is what the kernel ahead may still write, but for
        tensors that are `ready`. `ranks`: whose memory it is, if not that of rank 0.
        """
        given = {name: x for name, x in {**read, **written}.items() if x is not None}
        self.config, self._written = config, {name: given[name] for name in written if name in given}
        alignments = {name: x.element_size() for name, x in given.items()} | {**(aligned or {})}
        buffers = {
            name: Buffer(
                flat_memory(x), name in written, alignments[name], name not in ready, (ranks or {}).get(name, 0)
            )
            for name, x in given.items()
        }
        self._memory: Simulation | GpuMemory
        if is_on_gpu(how):
            self._memory = GpuMemory(buffers, how["device"], how.get("num_sms"))
            self.device = self._memory.device
        else:
            num_sms, seed = how.get("num_sms") or 2 * config.cluster_size, how.get("seed", 0)
            schedule, truncate = how.get("schedule"), how.get("truncate", False)
            self._memory = Simulation(buffers, num_sms=num_sms, seed=seed, schedule=schedule, truncate=truncate)
            self.device = _CPU
        self.num_sms = self._memory.num_sms
        self.at: dict[str, Any] = {name: self._memory.tensor(name, x) for name, x in given.items()}

    def placed(self, p: Problem) -> Problem:
        """Give a problem with the tensors here in place of those with their names."""
        return p._replace(**{name: x for name, x in self.at.items() if name in p._fields})  # type: ignore[no-any-return]

    def run(
        self,
        kernel: Kernel[Any],
        compiled: HostKernel | None,
        values_of: Callable[[Any], Mapping[str, Any] | bytes],
        grid: int,
        inputs: frozenset[str] = frozenset(),
        config: Config | None = None,
    ) -> None:
        """Launch a kernel with the parameters, or their bytes, that `values_of` makes of the tensors here, by name.

        What it wrote is copied back; it may not write `inputs`. `config`: the kernel's, if it is another one's stage.
        """
        config, values = config or self.config, values_of(self.at)
        launcher = self.launcher(kernel, compiled, config, inputs)
        packed = values if isinstance(values, bytes) else kernel.packed(config, values, launcher.encode)
        launch(launcher, packed, grid, self.device)
        self.copy_back()

    @contextmanager
    def launches(
        self, compiled: Mapping[Kernel[Any], HostKernel | None], inputs: Collection[str] = ()
    ) -> Iterator[None]:
        """Let kernels that code launches in this block run here: those `compiled`, or the package's own.

        All but the last may not write `inputs`.
        """
        into = _Into(self, dict(compiled), frozenset(inputs))
        with launching_into(into):
            yield

    def launcher(
        self, kernel: Kernel[Any], compiled: HostKernel | None, config: Config, inputs: frozenset[str] = frozenset()
    ) -> Any:
        """Give what launches a kernel here: a `jit.driver.Launcher`, or what takes its place in the simulator.

        `compiled`: None means the package's own source, which is all that a GPU runs.
        """
        if isinstance(self._memory, GpuMemory):
            if compiled is not None:
                raise ValueError(f"kernel: expected None for a GPU, got {compiled.name} compiled for the host")
            return self._memory.launcher(kernel, config)
        host = compiled or compiled_for_host(kernel, config)
        return Launcher(self._memory, host, kernel.params_of(config), config, inputs)

    def copy_back(self) -> None:
        """Copy what kernels wrote back into the tensors that it was made from, and what lies between their rows."""
        for name, x in self.result().buffers.items():
            flat_memory(self._written[name]).view(torch.uint8).copy_(flat_memory(x).view(torch.uint8))

    def result(self) -> Result:
        """Give what kernels wrote, each tensor as it lay before, and counters of the last kernel."""
        result = self._memory.result()
        for name in self._written:
            x = self.at[name]
            result.buffers[name] = flat_memory(x).cpu().as_strided(x.shape, x.stride())
        return result
