"""The kernel of cuda/hc_prenorm_few.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

from functools import cache

from .. import jit
from ..choose.config_hc_prenorm_few import HcFewConfig, grid
from ..jit import driver
from ..problem.hyper_connections import BLOCK_K, HcProblem
from .code_plan import CodePlan
from .params import Field, Kind, Params
from .sources import cuda_sources, generated

SOURCE = '#include "hc_prenorm_few.cuh"\n'
NAME = "tf32_hc_prenorm_gemm_few"
PARAMS = Params(
    "HcFewParams",
    Field("a", Kind.POINTER),
    Field("b", Kind.POINTER),
    Field("d", Kind.POINTER),
    Field("sqr_sum", Kind.POINTER),
    Field("a_pitch", Kind.UINT64),
    Field("b_pitch", Kind.UINT64),
    Field("d_pitch", Kind.UINT64),
    Field("d_stride", Kind.UINT64),
    Field("m", Kind.UINT32),
    Field("k_blocks", Kind.UINT32),
    Field("splits", Kind.UINT32),
    Field("tiles_n", Kind.UINT32),
)
"""`HcFewParams` of cuda/hc_prenorm_few.cuh."""

__all__ = ["NAME", "PARAMS", "SOURCE", "build", "code_plan", "grid", "headers", "launcher_of", "loaded", "params_of"]


def params_of(config: HcFewConfig, launcher: driver.Launcher, p: HcProblem) -> bytes:
    """Give the kernel's parameters."""
    m, n, k, splits = p.sizes
    return PARAMS.pack(
        {
            "a": p.a.data_ptr(),
            "b": p.b.data_ptr(),
            "d": p.d.data_ptr(),
            "sqr_sum": p.sqr_sum.data_ptr(),
            "a_pitch": p.a.stride(0) * p.a.element_size(),
            "b_pitch": p.b.stride(0) * p.b.element_size(),
            "d_pitch": p.d.stride(1),
            "d_stride": p.d.stride(0) if splits > 1 else 0,
            "m": m,
            "k_blocks": k // BLOCK_K,
            "splits": splits,
            "tiles_n": n // config.block_n,
        }
    )


def headers(config: HcFewConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {**cuda_sources(), "config.cuh": generated(config.header()), PARAMS.header_name: PARAMS.layout_header()}


def build(config: HcFewConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    return jit.build(SOURCE, headers(config), name=NAME)


def code_plan(config: HcFewConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of: ordinary loads and stores, and mma.sync."""
    return CodePlan(
        roles=((config.num_threads, None),),
        shared_bytes=config.shared_bytes,
        qgmma=0,
        tma_loads=0,
        multicast_loads=0,
    )


@cache
def loaded(config: HcFewConfig, device: int) -> driver.Kernel:
    """Get the kernel of a configuration on a device, compiled and loaded at first need."""
    return driver.Kernel(build(config), config.shared_bytes)


@cache
def launcher_of(config: HcFewConfig, device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way a configuration is launched on a device."""
    kernel = loaded(config, device)
    return driver.Launcher(kernel, PARAMS.size, config.num_threads, config.cluster, is_dependent=is_dependent)
