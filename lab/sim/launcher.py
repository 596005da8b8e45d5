"""Replaces the driver: a plan launches a kernel in the simulator as it would on a GPU.

The simulator therefore gets the same parameter bytes and the same grid as a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypedDict, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.jit.driver import ParamsBuffer
from deep_gemm.core.jit.tensor_map import TensorMap
from deep_gemm.core.kernel import Kernel, launch
from deep_gemm.core.params import Params

from .arguments import encode_tensor_map
from .library import HostKernel
from .simulate import Buffer, KernelLaunch, Simulation

_CPU = -1
"""The device index of CPU tensors."""
Problem = TypeVar("Problem", bound=Any)


def flat_memory(x: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, including padding between rows."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,))


def placed_in(simulation: Simulation, p: Problem) -> Problem:
    """Give the problem with its operands in the simulator's memory, in the buffers that have their names."""
    names = [name for name in ("a", "sfa", "b", "sfb", "d") if getattr(p, name) is not None]
    placed: Any = p._replace(**{name: simulation.tensor(name, getattr(p, name)) for name in names})
    if p.c is None:
        return placed  # type: ignore[no-any-return]
    c = placed.d if p.c.data_ptr() == p.d.data_ptr() else simulation.tensor("c", p.c)
    return placed._replace(c=c)  # type: ignore[no-any-return]


class Launcher:
    """The simulator's counterpart of `jit.driver.Launcher`."""

    def __init__(
        self,
        simulation: Simulation,
        kernel: HostKernel,
        params: Params,
        *,
        threads: int,
        shared_bytes: int,
        cluster_size: int = 1,
        inputs: frozenset[str] = frozenset(),
    ) -> None:
        """`inputs`: writable buffers that this kernel must not write."""
        self.simulation, self.kernel = simulation, kernel
        self.params, self._size = ParamsBuffer(params.size), params.size
        self.lock = threading.Lock()
        self.plan: object = None
        self.stream: int | None = None
        self.config = self.function = self.pointers = None
        self.success = 0
        self._fixed: dict[str, Any] = {
            "threads": threads,
            "shared_bytes": shared_bytes,
            "cluster_size": cluster_size,
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
        """Never called, because the simulator raises its errors itself."""
        raise AssertionError(status)


class Conditions(TypedDict, total=False):
    """Keywords of `Simulation` that functions which run a kernel pass on."""

    seed: int
    schedule: str | None
    truncate: bool


class Stage:
    """Tensors in the memory of a simulated GPU, where kernels run on them one after another."""

    def __init__(
        self,
        read: Mapping[str, Tensor | None],
        written: Mapping[str, Tensor | None],
        aligned: Mapping[str, int] | None = None,
        *,
        num_sms: int = 2,
        **conditions: Unpack[Conditions],
    ) -> None:
        """Copy tensors there. They begin at multiples of their elements, those in `aligned` at multiples of more."""
        given = {name: x for name, x in {**read, **written}.items() if x is not None}
        self._written = {name: given[name] for name in written if name in given}
        alignments = {name: x.element_size() for name, x in given.items()} | {**(aligned or {})}
        buffers = {
            name: Buffer(flat_memory(x), is_writable=name in written, alignment=alignments[name], is_dependent=True)
            for name, x in given.items()
        }
        self.simulation = Simulation(buffers, num_sms=num_sms, **conditions)
        self.at: dict[str, Any] = {name: self.simulation.tensor(name, x) for name, x in given.items()}

    def run(
        self,
        kernel: Kernel[Any],
        compiled: HostKernel,
        config: Any,
        params_of: Callable[[Any, Any], bytes],
        grid: int,
        inputs: frozenset[str] = frozenset(),
    ) -> None:
        """Launch a kernel with the parameters that `params_of` makes of the launcher and the tensors here, by name.

        What it wrote is copied back; it may not write `inputs`.
        """
        launcher = self.launcher(kernel, compiled, config, inputs)
        launch(launcher, params_of(launcher, self.at), grid, _CPU)
        self.copy_back()

    def launcher(
        self, kernel: Kernel[Any], compiled: HostKernel, config: Any, inputs: frozenset[str] = frozenset()
    ) -> Any:
        """Give what launches a kernel here, in place of a `jit.driver.Launcher`."""
        return Launcher(
            self.simulation,
            compiled,
            kernel.params_of(config),
            threads=config.num_threads,
            shared_bytes=config.shared_bytes,
            cluster_size=config.cluster_size,
            inputs=inputs,
        )

    def copy_back(self) -> None:
        """Copy what kernels wrote back into the tensors that it was made from."""
        found = self.simulation.result().buffers
        for name, tensor in self._written.items():
            flat_memory(tensor).view(torch.uint8).copy_(torch.as_tensor(found[name]).view(torch.uint8))
