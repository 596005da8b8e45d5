"""Launches without a plan: of kernels whose parameters are quickly packed, ordinary loads and stores in their code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from .. import jit
from ..jit import driver
from ..settings import get_compile_mode, get_pdl, in_force
from .code_plan import CodePlan
from .params import Params
from .sources import cuda_sources, generated


class Config(Protocol):
    """A configuration: what its kernel's source is compiled for. Equal ones have equal hashes."""

    @property
    def name(self) -> str:
        """Short, for people."""
        ...

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        ...

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that are to share an SM; the launch bounds say so too."""
        ...

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        ...

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        ...


C = TypeVar("C", bound=Config)


class OrdinaryKernel(Generic[C]):
    """The kernel of cuda/<name>.cuh, without tensor maps, products or clusters: how it is compiled and launched.

    A kernel of this sort states its parameters, chooses a configuration of type `C`, and says how many CTAs it needs.
    """

    def __init__(self, name: str, params: Params, *, bulk_copies: int = 0) -> None:
        """`bulk_copies` is how many copies between shared memory and addresses its code has."""
        self.name, self.params, self.bulk_copies = name, params, bulk_copies
        self.source = f'#include "{name}.cuh"\n'
        self._launchers: dict[tuple[C, int, bool], driver.Launcher] = {}

    def headers(self, config: C) -> dict[str, str]:
        """Everything that the kernel's source includes, for one configuration."""
        layout = {self.params.header_name: self.params.layout_header()}
        return {**cuda_sources(), "config.cuh": generated(config.header()), **layout}

    def build(self, config: C) -> jit.CompiledKernel:
        """Compile the kernel, or take it from the cache."""
        reason = config.why_illegal()
        if reason is not None:
            raise ValueError(f"config: {reason}, got {config}")
        return jit.build(self.source, self.headers(config), name=self.name)

    def code_plan(self, config: C) -> CodePlan:
        """Derive what the kernel's machine code must consist of: ordinary loads and stores, and bulk copies."""
        return CodePlan(
            roles=((config.num_threads, None),),
            shared_bytes=config.shared_bytes,
            qgmma=0,
            tma_loads=0,
            multicast_loads=0,
            bulk_copies=self.bulk_copies,
            ctas_per_sm=config.ctas_per_sm,
        )

    def launcher(self, config: C, device: int, is_dependent: bool) -> driver.Launcher:
        """Get the way a configuration is launched on a device, compiled and loaded at first need."""
        key = config, device, is_dependent
        found = self._launchers.get(key)
        if found is None:
            kernel = driver.Kernel(self.build(config), config.shared_bytes)
            made = driver.Launcher(kernel, self.params.size, config.num_threads, 1, is_dependent=is_dependent)
            found = self._launchers.setdefault(key, made)
        return found

    def run(self, config: C, params: bytes, grid: int, device: int, *, is_dependent: bool = False) -> None:
        """Launch for a configuration on the current stream of this device.

        `is_dependent` says that the kernel before is the package's own, and may still be ending.
        """
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self.run(config, params, grid, device, is_dependent=is_dependent)
            return
        launcher = self.launcher(config, device, is_dependent or get_pdl())
        if get_compile_mode() == 0:
            launch(launcher, params, grid, device)

    def prepared(
        self, config: C, params: bytes, changing: Sequence[str], device: int, *, is_dependent: bool = False
    ) -> Prepared[C]:
        """Prepare launches on this device that have these parameters but for members `changing`; see `run`."""
        return Prepared(self, config, params, changing, device, is_dependent)


class Prepared(Generic[C]):
    """Launches of one kernel that differ in a few parameters: the others are packed once, and all else is looked up.

    Each launch states the values that change. The settings in force are those of the launch, as everywhere.
    """

    def __init__(
        self,
        kernel: OrdinaryKernel[C],
        config: C,
        params: bytes,
        changing: Sequence[str],
        device: int,
        is_dependent: bool,
    ) -> None:
        self.kernel, self.config, self.params, self.device = kernel, config, params, device
        self.changes = kernel.params.patch(changing)
        self._is_dependent = is_dependent
        self._launcher: driver.Launcher | None = None
        self._generation = -1  # of the settings for which the launcher was looked up

    def launch(self, grid: int, *values: int) -> None:
        """Launch so many CTAs on the current stream of the device; `values` of the members that change, in order."""
        launcher, device = self._launcher, self.device
        if launcher is None or self._generation != in_force.generation:
            launcher = self._look_up()
        if launcher.current_device() != device:
            with torch.cuda.device(device):
                self.launch(grid, *values)
            return
        if in_force.choices.compile_mode:
            return
        with launcher.lock:
            if launcher.plan is not self or launcher.grid != grid:
                launcher.hold(self, self.params, grid)
            memory = launcher.params.bytes
            for pack_into, at, which in self.changes:
                pack_into(memory, at, *values[which])
            stream = launcher.current_stream(device)
            if stream != launcher.stream:
                launcher.set_stream(stream)
            (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
            if status != launcher.success:
                launcher.start_again(status, device)

    def _look_up(self) -> driver.Launcher:
        generation = in_force.generation
        if torch._C._cuda_getDevice() != self.device:
            with torch.cuda.device(self.device):
                return self._look_up()
        self._launcher = self.kernel.launcher(self.config, self.device, self._is_dependent or get_pdl())
        self._generation = generation
        return self._launcher


def computes_on(device: int) -> bool:
    """Tell whether this device is the current one, and calls compute what they are asked, instead of only compiling."""
    return torch._C._cuda_getDevice() == device and get_compile_mode() == 0


def launch(launcher: driver.Launcher, params: bytes, grid: int, device: int) -> None:
    """Launch with these parameters on the current stream of the current device, which is `device`."""
    with launcher.lock:
        launcher.hold(None, params, grid)
        stream = launcher.current_stream(device)
        if stream != launcher.stream:
            launcher.set_stream(stream)
        (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
        if status != launcher.success:
            launcher.start_again(status, device)
