"""A kernel, its configurations, and its launches: one form for all kernels, so that tools loop over them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch

from . import jit
from .jit import driver
from .jit.tensor_map import TensorMap
from .params import Params
from .settings import get_compile_mode, get_pdl
from .shadow import Mapped, target
from .sources import cuda_sources, generated


class Config:
    """The settings that a kernel's source is compiled for. Subclasses are frozen dataclasses, which can be keys."""

    taken: ClassVar[tuple[str, ...]] = ()
    """Attributes that become constants of the source: `num_stages` becomes `kNumStages`."""

    @property
    def name(self) -> str:
        """Short description for people."""
        return f"{self.num_threads} threads"

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """Threads of a CTA."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return 0

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that must fit on an SM at a time, as the launch bounds require."""
        return 1

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def kernel_name(self) -> str | None:
        """The kernel's name if the source reads it from `config.cuh`, else None."""
        return None

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs for a configuration; a rule may rely on earlier rules."""
        return iter(())

    def why_illegal(self) -> str | None:
        """Return why the kernel cannot be built for this configuration; None if it can."""
        return next((f"needs {rule}" for holds, rule in self.rules() if not holds), None)

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source reads from its configuration."""
        return constants_of(self, *self.taken)

    def choices(self) -> Mapping[str, str]:
        """Return the macros by which the source includes a file or inserts a word."""
        return {}

    def header(self) -> str:
        """Write `config.cuh`: every constant and macro that the source reads from its configuration."""
        lines = ["#pragma once", '#include "types.cuh"']
        for name, value in self.constants().items():
            kind = "bool" if isinstance(value, bool) else "uint32_t"
            lines.append(f"constexpr {kind} {name} = {str(value).lower()};")
        for name, choice in self.choices().items():
            lines.append(f'#define {name} "{choice}"' if choice.endswith(".cuh") else f"#define {name} {choice}")
        return "\n".join([*lines, ""])


@dataclass(frozen=True)
class CodePlan:
    """The instructions and resources that one configuration's machine code must have; `lab/gates.py` checks them.

    Instructions are counted in the code, not as they run.
    """

    roles: tuple[tuple[int, int | None], ...]
    """(threads, registers of a thread after setmaxnreg) of each role of a CTA; None for a role without setmaxnreg."""
    shared_bytes: int
    """Dynamic shared memory of a launch."""
    qgmma: int = 0
    """FP8 WGMMAs of one k-block. The code has no more, because the loop over k is neither unrolled nor peeled."""
    tma_loads: int = 0
    multicast_loads: int = 0
    """Loads among `tma_loads` that write to every CTA of a cluster."""
    tma_stores: int = 0
    tma_reduces: int = 0
    """Stores that add to numbers in global memory."""
    bulk_copies: int = 0
    """Bulk copies between shared memory and plain addresses, without a tensor map."""
    hgmma: int = 0
    """BF16 WGMMA instructions."""
    ctas_per_sm: int = 1
    """CTAs that must fit on an SM at a time."""

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return sum(threads for threads, _ in self.roles)


def constants_of(of: object, *names: str) -> dict[str, int | bool]:
    """Return these attributes as constants of a source: `num_stages` becomes `kNumStages`."""
    return {f"k{name.title().replace('_', '')}": getattr(of, name) for name in names}


C = TypeVar("C", bound=Config)


class Kernel(Generic[C]):
    """The kernel of <source>.cuh: its compilation, the plan of its machine code, and its launches.

    A kernel's family states the parameters and configurations. For each problem, the family chooses a configuration,
    fills in the parameters and computes the number of CTAs.
    """

    def __init__(
        self,
        source: str,
        params: str | Params | Callable[[C], Params],
        configs: Callable[[], Sequence[C]],
        *,
        lengths: Mapping[str, int] | None = None,
        name: str | None = None,
        code: Callable[[C], CodePlan] | None = None,
        more: Callable[[C], Mapping[str, str]] | None = None,
        bulk_copies: int = 0,
        promotes: bool = False,
    ) -> None:
        """State a kernel.

        - `params`: a launch's parameters: a struct's name in the source, `Params`, or a function of a configuration.
        - `lengths`: the constants that are lengths of arrays in the struct.
        - `configs`: returns every configuration that can be chosen.
        - `name`: the kernel's name in profilers and reports, if it differs from the source's.
        - `code`: returns the plan of the machine code. The default: ordinary loads and stores, and `bulk_copies`
          between shared memory and plain addresses.
        - `more`: makes further headers for a configuration, such as `wgmma_shapes.cuh`.
        - `promotes`: FFMAs promote partial sums; old compilers put these FFMAs into a slow order.
        """
        self.name, self.kernel_name = source, name or source
        self.configs: Callable[[], Sequence[C]] = cache(configs)
        self.source = f'#include "{source}.cuh"\n'
        self._params, self._lengths, self._code, self._more = params, lengths, code, more
        self._bulk_copies, self._promotes = bulk_copies, promotes

    def name_of(self, config: C) -> str:
        """Return a configuration's name in profilers."""
        return config.kernel_name or self.kernel_name

    def params_of(self, config: C) -> Params:
        """Return the parameters of a configuration."""
        return self._params(config) if callable(self._params) else self.params

    @cached_property
    def params(self) -> Params:
        """The parameters, if all configurations share them."""
        if isinstance(self._params, str):
            return Params.of_source(self.source, self._params, self._lengths)
        assert isinstance(self._params, Params)
        return self._params

    def headers(self, config: C) -> dict[str, str]:
        """Return all files that the kernel's source may include, for one configuration."""
        params = self.params_of(config)
        made = {} if self._more is None else self._more(config)
        own = {"config.cuh": generated(config.header()), params.header_name: params.layout_header()}
        return {**cuda_sources(), **own, **made}

    def passes(self, config: C) -> tuple[jit.Pass, ...]:
        """Return the passes that improve the machine code of the compiler in use."""
        return jit.passes_for(config.num_threads * config.ctas_per_sm) if self._promotes else ()

    def build(self, config: C) -> jit.CompiledKernel:
        """Compile the kernel, or load it from the cache."""
        reason = config.why_illegal()
        if reason is not None:
            raise ValueError(f"config: {reason}, got {config}")
        name, passes = self.name_of(config), self.passes(config)
        return jit.build(self.source, self.headers(config), name=name, passes=passes, config=config.name)

    def code_plan(self, config: C) -> CodePlan:
        """Derive the plan that the kernel's machine code must meet."""
        if self._code is not None:
            return self._code(config)
        return CodePlan(
            roles=((config.num_threads, None),),
            shared_bytes=config.shared_bytes,
            bulk_copies=self._bulk_copies,
            ctas_per_sm=config.ctas_per_sm,
        )

    @cache  # noqa: B019 - a source has one kernel, which is never freed
    def loaded(self, config: C, device: int) -> driver.Kernel:
        """Return a configuration's kernel on a device. The first call compiles and loads it."""
        return driver.Kernel(self.build(config), config.shared_bytes)

    @cache  # noqa: B019
    def launcher(self, config: C, device: int, is_dependent: bool) -> driver.Launcher:
        """Return the launcher of a configuration on a device. The first call compiles and loads the kernel."""
        kernel, size = self.loaded(config, device), self.params_of(config).size
        threads, cluster = config.num_threads, config.cluster_size
        return driver.Launcher(kernel, size, threads, cluster, is_dependent=is_dependent, of=config.name)

    def fits(self, config: C, device: int) -> bool:
        """Tell whether a cluster of this configuration fits on a device, which must be the current one."""
        self.launcher(config, device, get_pdl())  # a launcher first permits clusters of more than 8 CTAs
        return driver.clusters_at_once(self.loaded(config, device), config.num_threads, config.cluster_size) > 0

    def run(self, config: C, values: Mapping[str, Any], grid: Any, device: int, *, is_dependent: bool = False) -> None:
        """Launch for a configuration on the current stream of this device, or add the launch to a record in the making.

        `values` has a value for each member of the parameters: a number, a tensor, a `Mapped`, None for no tensor, a
        tuple for an array, or bytes. `is_dependent`: the kernel before it is the package's own, and may still be
        running its end.
        """
        into = target()
        if into is not None:
            into.launch(self, config, values, grid, device, is_dependent or get_pdl())
            return None
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                return self.run(config, values, grid, device, is_dependent=is_dependent)
        launcher = self.launcher(config, device, is_dependent or get_pdl())
        if get_compile_mode() == 0:
            launch(launcher, self.packed(config, values, launcher.encode), grid, device)
        return None

    def packed(
        self, config: C, values: Mapping[str, Any], encode: Callable[[TensorMap, int, int], bytes] | None = None
    ) -> bytes:
        """Return the bytes of a launch's parameters."""

        def plain(value: Any) -> Any:
            if value is None:
                return 0
            if isinstance(value, Mapped):
                assert encode is not None
                return encode(value.map, value.x.data_ptr() - value.before, value.x.data_ptr())
            if isinstance(value, tuple):
                return tuple(map(plain, value))
            return value.data_ptr() if isinstance(value, torch.Tensor) else value

        return self.params_of(config).pack({name: plain(value) for name, value in values.items()})


def launch(launcher: driver.Launcher, params: bytes, grid: int, device: int) -> None:
    """Launch with these parameters on the current stream of the current device, which is `device`."""
    with launcher.lock:
        launcher.hold(params, grid)
        stream = launcher.current_stream(device)
        if stream != launcher.stream:
            launcher.set_stream(stream)
        (status,) = launcher.start(launcher.config, launcher.function, launcher.pointers, 0)
        if status != launcher.success:
            launcher.start_again(status, device)
