"""A GPU's memory in place of a simulation's: trials run on a GPU too, with the launchers of the package's calls.

It also detects a write next to the outputs. Only the simulator detects races, and reads next to the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from deep_gemm.core.jit import driver
from deep_gemm.core.kernel import Config, Kernel, launch

from .simulate import Arena, Buffer, Result

KEPT: list[list[GpuMemory]] = []
"""Lists that collect each new GpuMemory: see `kept`."""


class GpuMemory:
    """Buffers in a GPU's memory. Kernels run there one after another."""

    def __init__(self, buffers: Mapping[str, Buffer], device: str, num_sms: int | None = None) -> None:
        """`num_sms`: the number of SMs for launches of persistent kernels; default: all."""
        self.arena = Arena(buffers, device)
        self.tensor = self.arena.tensor
        self.device = self.arena.memory.get_device()
        self.num_sms = num_sms or torch.cuda.get_device_properties(self.device).multi_processor_count
        self._written = [name for name, buffer in buffers.items() if buffer.is_writable]
        self.is_dependent = any(buffer.is_dependent for buffer in buffers.values())
        """True: the previous kernel may still write buffers that are not ready, as kernels start before it ends."""
        self._before: torch.Tensor | None = None
        self._launches: list[tuple[driver.Launcher, bytes, int]] = []
        for each in KEPT:
            each.append(self)

    def launch(self, kernel: Kernel[Any], config: Config, values: Mapping[str, Any], grid: int) -> None:
        """Launch a kernel here. All inputs must have their values."""
        if self._before is None:
            self._before = self.arena.memory.clone()
        size = kernel.params_of(config).size
        loaded, is_dependent = kernel.loaded(config, self.device), self.is_dependent
        launcher = driver.Launcher(loaded, size, config.num_threads, config.cluster_size, is_dependent=is_dependent)
        self._launches.append((launcher, kernel.packed(config, values, launcher.encode), grid))
        launch(*self._launches[-1], self.device)

    def restore(self) -> None:
        """Restore the memory's contents before the first launch: kernels that count arrivals need these contents."""
        assert self._before is not None
        self.arena.memory.copy_(self._before)

    def launch_again(self) -> None:
        """Repeat all launches, in order, on the present memory."""
        for each in self._launches:
            launch(*each, self.device)

    def result(self) -> Result:
        """Wait for the launches; raise a ValueError if a kernel wrote next to the outputs."""
        if self._before is not None and (name := self.arena.changed(self._before, self._written)) is not None:
            raise ValueError(f"{name}: expected a write to outputs alone, got a write to it or next to it")
        return Result({}, *[0] * 6)


@contextmanager
def kept() -> Iterator[list[GpuMemory]]:
    """Collect every GpuMemory made in this block, in order."""
    made: list[GpuMemory] = []
    KEPT.append(made)
    try:
        yield made
    finally:
        KEPT.remove(made)
