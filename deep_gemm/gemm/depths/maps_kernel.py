"""The kernel of gemm/k_group_maps.cuh, which makes the tensor maps of groups along k on the GPU."""

from __future__ import annotations

from functools import cache

from ...core import jit
from ...core.jit import driver
from ...core.params import Field, Kind, Params
from ...core.sources import cuda_sources

SOURCE = '#include "k_group_maps.cuh"\n'
NAME = "k_group_maps"
THREADS = 32
"""Threads of its blocks, one for each group."""
MAX_INLINE_KS = 896
"""Depths from the host that it takes among its parameters."""
GROUP_BYTES, COUNTER_BYTES = 320, 4
"""Sizes of what it writes: a `KGroup` for each group, and behind them the counter of tiles."""
PARAMS = Params(
    "MapParams",
    Field("map_a", Kind.MAP),
    Field("map_b", Kind.MAP),
    Field("a", Kind.POINTER),
    Field("b", Kind.POINTER),
    Field("k_groups", Kind.POINTER),
    Field("ks", Kind.POINTER),
    Field("m", Kind.UINT32),
    Field("n", Kind.UINT32),
    Field("count", Kind.UINT32),
    Field("sum_k", Kind.UINT32),
    Field("num_k_blocks", Kind.UINT32),
    Field("inline_ks", Kind.UINT32, MAX_INLINE_KS),
)


def headers() -> dict[str, str]:
    """Everything that the kernel's source includes; it has no configuration."""
    return {**cuda_sources(), "map_params_layout.cuh": PARAMS.layout_header()}


def build() -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    return jit.build(SOURCE, headers(), name=NAME)


def room_bytes(num_groups: int) -> int:
    """Size of what it writes for the kernel that multiplies."""
    return num_groups * GROUP_BYTES + COUNTER_BYTES


@cache
def loaded(device: int) -> driver.Kernel:
    """Get the kernel on a device, compiled and loaded at first need."""
    return driver.Kernel(build(), 0)


@cache
def launcher(device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way it is launched on a device."""
    return driver.Launcher(loaded(device), PARAMS.size, THREADS, 1, is_dependent=is_dependent)
