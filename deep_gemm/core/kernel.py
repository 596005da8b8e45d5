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
    """A configuration: what a kernel's source is compiled for. Heirs are frozen dataclasses: equal ones hash alike."""

    taken: ClassVar[tuple[str, ...]] = ()
    """Attributes that the source takes as constants of their names."""

    @property
    def name(self) -> str:
        """Short, for people."""
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
        """CTAs that are to share an SM; the launch bounds say so too."""
        return 1

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def kernel_name(self) -> str | None:
        """The kernel's name where the source takes it from `config.cuh`."""
        return None

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs for a configuration; a rule may rely on the ones before it."""
        return iter(())

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built for this configuration; None if it can."""
        return next((f"needs {rule}" for holds, rule in self.rules() if not holds), None)

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes from its configuration."""
        return constants_of(self, *self.taken)

    def choices(self) -> Mapping[str, str]:
        """Give the macros that make the source pick a file or a word."""
        return {}

    def header(self) -> str:
        """Give `config.cuh`: every constant and choice that the kernel's source takes from its configuration."""
        lines = ["#pragma once", '#include "types.cuh"']
        for name, value in self.constants().items():
            lines.append(
                f"constexpr {'bool' if isinstance(value, bool) else 'uint32_t'} {name} = {str(value).lower()};"
            )
        for name, choice in self.choices().items():
            lines.append(f'#define {name} "{choice}"' if choice.endswith(".cuh") else f"#define {name} {choice}")
        return "\n".join([*lines, ""])


@dataclass(frozen=True)
class CodePlan:
    """The parts that the machine code of one configuration must have; `lab/gates.py` compares the two.

    Counts are of instructions, not of executions.
    """

    roles: tuple[tuple[int, int | None], ...]
    """(threads, registers of each after setmaxnreg) of the roles that share a block; None where nothing is moved."""
    shared_bytes: int
    """Dynamic shared memory of a launch."""
    qgmma: int = 0
    """FP8 tensor core instructions of one k-block, because the k loop is neither unrolled nor peeled."""
    tma_loads: int = 0
    multicast_loads: int = 0
    """The part of `tma_loads` that writes to every CTA of a cluster."""
    tma_stores: int = 0
    tma_reduces: int = 0
    """Stores that add to numbers in global memory."""
    bulk_copies: int = 0
    """Copies from shared memory to addresses, or the other way."""
    hgmma: int = 0
    """Tensor-core products of BF16."""
    ctas_per_sm: int = 1
    """Blocks that are to share an SM."""

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return sum(threads for threads, _ in self.roles)


def constants_of(of: object, *names: str) -> dict[str, int | bool]:
    """Give the constants that repeat these attributes: `kNumStages` is `num_stages`."""
    return {f"k{name.title().replace('_', '')}": getattr(of, name) for name in names}


C = TypeVar("C", bound=Config)


class Kernel(Generic[C]):
    """The kernel of <source>.cuh: its compilation, the plan of its machine code, and its launches.

    Its family states parameters and configurations, chooses one for a problem, fills in the parameters, and says how
    many CTAs it needs.
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

        - `params`: what a launch takes, for all configurations or each: the name of a struct of its source, or fields.
        - `lengths`: constants that the struct names as lengths of its arrays.
        - `configs`: gives every configuration that can be chosen.
        - `name`: its name in profilers and reports, if it is not the source's.
        - `code`: gives the plan of its machine code. If left out: ordinary loads and stores, and `bulk_copies` between
          shared memory and addresses.
        - `more`: headers that are made for a configuration, such as `wgmma_shapes.cuh`.
        - `promotes`: partial sums are promoted by FFMAs, which old compilers leave in a slow order.
        """
        self.name, self.kernel_name = source, name or source
        self.configs: Callable[[], Sequence[C]] = cache(configs)
        self.source = f'#include "{source}.cuh"\n'
        self._params, self._lengths, self._code, self._more = params, lengths, code, more
        self._bulk_copies, self._promotes = bulk_copies, promotes

    def name_of(self, config: C) -> str:
        """Give a configuration's name in profilers."""
        return config.kernel_name or self.kernel_name

    def params_of(self, config: C) -> Params:
        """Give the list of parameters of a configuration."""
        return self._params(config) if callable(self._params) else self.params

    @cached_property
    def params(self) -> Params:
        """The list of parameters, if all configurations have one."""
        if isinstance(self._params, str):
            return Params.of_source(self.source, self._params, self._lengths)
        assert isinstance(self._params, Params)
        return self._params

    def headers(self, config: C) -> dict[str, str]:
        """Give everything that the kernel's source includes, for one configuration."""
        params = self.params_of(config)
        made = {} if self._more is None else self._more(config)
        own = {"config.cuh": generated(config.header()), params.header_name: params.layout_header()}
        return {**cuda_sources(), **own, **made}

    def passes(self, config: C) -> tuple[jit.Pass, ...]:
        """Give the passes over machine code that the compiler in use makes worthwhile."""
        return jit.passes_for(config.num_threads * config.ctas_per_sm) if self._promotes else ()

    def build(self, config: C) -> jit.CompiledKernel:
        """Compile the kernel, or take it from the cache."""
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

    @cache  # noqa: B019 - each source has one kernel, which stays
    def loaded(self, config: C, device: int) -> driver.Kernel:
        """Get the kernel of a configuration on a device, compiled and loaded at first need."""
        return driver.Kernel(self.build(config), config.shared_bytes)

    @cache  # noqa: B019
    def launcher(self, config: C, device: int, is_dependent: bool) -> driver.Launcher:
        """Get the way a configuration is launched on a device, compiled and loaded at first need."""
        kernel, size = self.loaded(config, device), self.params_of(config).size
        threads, cluster = config.num_threads, config.cluster_size
        return driver.Launcher(kernel, size, threads, cluster, is_dependent=is_dependent, of=config.name)

    def fits(self, config: C, device: int) -> bool:
        """Ask whether a device, which is the current one, has room for a cluster of this configuration."""
        self.launcher(config, device, get_pdl())  # the driver wants to know first that the size is meant
        return driver.clusters_at_once(self.loaded(config, device), config.num_threads, config.cluster_size) > 0

    def run(self, config: C, values: Mapping[str, Any], grid: Any, device: int, *, is_dependent: bool = False) -> None:
        """Launch for a configuration on the current stream of this device; or add the launch to a record being made.

        `values` are the members of the parameters: numbers, tensors, `Mapped`, None for no tensor,
        tuples for arrays, or bytes. `is_dependent` says that the kernel before is the package's own, and may still be
        ending.
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
        """Give the bytes of a launch's parameters."""

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
