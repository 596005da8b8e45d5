"""Replaces the driver: launch code for a GPU launches a kernel in the simulator instead.

So the simulator gets the same parameter bytes and the same grid as a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.kernel import Config, Kernel
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
    """Return the memory from a tensor's first element to its last, including padding between rows."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((extent,), (1,))


class _Into(NamedTuple):
    """Sends launches to a stage."""

    stage: Stage
    compiled: dict[Kernel[Any], HostKernel | None]
    inputs: frozenset[str]

    def launch(
        self, kernel: Kernel[Any], config: Any, values: Mapping[str, Any], grid: int, device: int, is_dependent: bool
    ) -> None:
        """Launch a kernel on the stage."""
        is_last = kernel is [*self.compiled][-1]
        inputs = frozenset() if is_last else self.inputs
        self.stage.launch(kernel, self.compiled[kernel], config, values, grid, inputs)

    def room(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
        """Refuse to allocate: a stage's memory is fixed from the start."""
        raise AssertionError(shape)


class How(TypedDict, total=False):
    """Settings of a simulation: keywords that functions which run a kernel pass on to the simulation."""

    num_sms: int | None
    """None: the number of CTAs in two clusters."""
    seed: int
    schedule: str | None
    truncate: bool
    """True: WGMMA accumulates with Hopper's few bits; False: exactly."""
    device: str
    """`cpu`: the simulator, the default everywhere. `cuda`: a GPU, for which only the number of SMs matters."""


def is_on_gpu(how: How) -> bool:
    """Tell whether kernels run on a GPU, whose tensor cores keep fewer bits than the simulator's."""
    return how.get("device", "cpu") != "cpu"


class Stage:
    """Tensors in the memory of a GPU (by default a simulated one), where kernels run on them one after another."""

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
        """Copy tensors into the stage's memory, at multiples of their element size, or of their number in `aligned`.

        `config` belongs to the kernel with the largest clusters. The previous kernel may still write all tensors except
        the `ready` ones. `ranks`: the rank whose memory holds a tensor, if not rank 0.
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
        """Replace tensors of a problem by the stage's tensors with the same names."""
        return p._replace(**{name: x for name, x in self.at.items() if name in p._fields})  # type: ignore[no-any-return]

    def run(
        self,
        kernel: Kernel[Any],
        compiled: HostKernel | None,
        values_of: Callable[[Any], Mapping[str, Any]],
        grid: int,
        inputs: frozenset[str] = frozenset(),
        config: Config | None = None,
    ) -> None:
        """Launch a kernel with the parameters that `values_of` makes from the stage's tensors, by name.

        Its outputs are copied back; it must not write `inputs`. `config`: the kernel's, if the stage has another one.
        """
        self.launch(kernel, compiled, config or self.config, values_of(self.at), grid, inputs)
        self.copy_back()

    @contextmanager
    def launches(
        self, compiled: Mapping[Kernel[Any], HostKernel | None], inputs: Collection[str] = ()
    ) -> Iterator[None]:
        """Run here the kernels that code in this block launches: the `compiled` ones, or the package's own.

        All kernels but the last must not write `inputs`.
        """
        into = _Into(self, dict(compiled), frozenset(inputs))
        with launching_into(into):
            yield

    def launch(
        self,
        kernel: Kernel[Any],
        compiled: HostKernel | None,
        config: Config,
        values: Mapping[str, Any],
        grid: int,
        inputs: frozenset[str] = frozenset(),
    ) -> None:
        """Launch a kernel here, from the package's own source if `compiled` is None, as on a GPU."""
        if isinstance(self._memory, GpuMemory):
            if compiled is not None:
                raise ValueError(f"kernel: expected None for a GPU, got {compiled.name} compiled for the host")
            self._memory.launch(kernel, config, values, grid)
        else:
            packed = kernel.packed(config, values, encode_tensor_map)
            host = compiled or compiled_for_host(kernel, config)
            self._memory.launch(KernelLaunch.of(host, config, packed, grid, inputs))

    def copy_back(self) -> None:
        """Copy the kernels' outputs, and the memory between their rows, back into the original tensors."""
        for name, x in self.result().buffers.items():
            flat_memory(self._written[name]).view(torch.uint8).copy_(flat_memory(x).view(torch.uint8))

    def result(self) -> Result:
        """Return the kernels' outputs, each with its tensor's strides, and counters of the last kernel."""
        result = self._memory.result()
        for name in self._written:
            x = self.at[name]
            result.buffers[name] = flat_memory(x).cpu().as_strided(x.shape, x.stride())
        return result
