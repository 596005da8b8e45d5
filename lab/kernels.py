"""Every kernel of the package in one form, for tools that loop over all of them.

A kernel has the name of its file in `deep_gemm/cuda`. One that is missing here no tool looks at; a test finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from deep_gemm.core.code_plan import CodePlan
from deep_gemm.core.jit import applied, passes_for
from deep_gemm.core.jit.compiler import CompiledKernel, compile_cubin
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm.bf16 import choose as bf16
from deep_gemm.gemm.bf16 import kernel as bf16_gemm
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense import choose as dense
from deep_gemm.gemm.depths import choose as depths
from deep_gemm.gemm.depths import maps_kernel as k_group_maps
from deep_gemm.gemm.heads import choose as heads
from deep_gemm.gemm.rows import choose as rows
from deep_gemm.gemm.skip import choose as skip_head_mid
from deep_gemm.hyper import KERNELS as OF_HYPER
from deep_gemm.indexer import KERNELS as OF_INDEXER
from deep_gemm.linear import KERNELS as OF_LINEAR
from deep_gemm.ordinary import reachable_ordinary


class Listed(NamedTuple):
    """A kernel: its source, what its machine code must consist of, and every configuration that can be chosen."""

    name: str
    source: str
    headers: Callable[[Any], dict[str, str]]
    code_plan: Callable[[Any], CodePlan]
    configs: Callable[[], Sequence[Any]]

    def compiled(self, config: Any) -> CompiledKernel:
        """Compile a configuration for sm_90a, without the cache."""
        kernel = compile_cubin(self.source, self.headers(config), name=f"{self.name} {config.name}")
        return applied(passes_for(config.num_threads), kernel) if self.name == "fp8_gemm" else kernel

    def named(self, config: str | None) -> Any:
        """Find a configuration by its name; None: the first."""
        names = {each.name: each for each in self.configs()}
        if config is not None and config not in names:
            raise ValueError(f"config: expected one of {list(names)}, got {config!r}")
        return next(iter(names.values())) if config is None else names[config]


class OnlyConfig(NamedTuple):
    """The configuration of a kernel that has no others."""

    name: str
    num_threads: int


def all_kernels() -> dict[str, Listed]:
    """Give all kernels, by their names."""
    modules = {
        fp8_gemm: _products_of(GemmConfig),
        bf16_gemm: _bf16,
        fp8_gemm_decode: _products_of(DecodeConfig),
    }
    found = [
        Listed(each.__name__.rpartition(".")[2], each.SOURCE, each.headers, each.code_plan, configs)
        for each, configs in modules.items()
    ]
    found += [
        Listed(each.source_name, each.source, each.headers, each.code_plan, each.configs)
        for each in (*OF_LINEAR, *OF_INDEXER[:2], *OF_HYPER)  # the indexer's third is an ordinary one
    ]
    maps = k_group_maps
    found.append(Listed(maps.NAME, maps.SOURCE, lambda _: maps.headers(), _plan_of_maps, _one_of_maps))
    for kernel, of_kernel in reachable_ordinary():
        found.append(Listed(kernel.name, kernel.source, kernel.headers, kernel.code_plan, partial(list, of_kernel)))
    return {each.name: each for each in found}


def kernel_named(name: str) -> Listed:
    """Find a kernel by its name."""
    kernels = all_kernels()
    if name not in kernels:
        raise ValueError(f"kernel: expected one of {', '.join(kernels)}, got {name}")
    return kernels[name]


def _products_of(kind: type) -> Callable[[], list[Any]]:
    def configs() -> list[Any]:
        ways = (
            *dense.reachable(),
            *dense.reachable_decode(),
            *rows.reachable_grouped(),
            *rows.reachable_silu(),
            *depths.reachable_k_grouped(),
            *heads.reachable(),
            *skip_head_mid.reachable_skipping(),
        )
        return [config for config in dict.fromkeys(ways) if isinstance(config, kind)]

    return configs


def _bf16() -> list[Any]:
    ways = bf16.reachable_bf16, bf16.reachable_bf16_rows, bf16.reachable_bf16_depths, bf16.reachable_bf16_sum
    return list(dict.fromkeys(config for reachable in ways for config in reachable()))


def _one_of_maps() -> list[OnlyConfig]:
    return [OnlyConfig("maps", k_group_maps.THREADS)]


def _plan_of_maps(config: OnlyConfig) -> CodePlan:
    return CodePlan(roles=((config.num_threads, None),), shared_bytes=0, qgmma=0, tma_loads=0, multicast_loads=0)
