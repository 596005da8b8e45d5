"""The kernel of cuda/hc_prenorm.cuh: how it is compiled for a configuration, and launched for a problem."""

from __future__ import annotations

import sys
from functools import cache, lru_cache
from typing import Any

import torch

from .. import jit
from ..choose.config_hc_prenorm import HcConfig, grid, units
from ..choose.config_hc_prenorm_few import HcFewConfig
from ..choose.hc_prenorm import reachable, select_hc, usual_hc
from ..gpus import gpu_of
from ..jit import driver
from ..jit.tensor_map import ElementType, TensorMap
from ..problem.hyper_connections import BLOCK_K, HcProblem
from ..settings import get_batch_invariant, get_compile_mode, get_pdl, num_sms_of
from . import hc_prenorm_few
from .code_plan import CodePlan
from .launch import launch
from .maps import matrix_map
from .params import Field, Kind, Params
from .sources import cuda_sources, generated
from .wgmma_header import wgmma_bf16_header

SOURCE = '#include "hc_prenorm.cuh"\n'
NAME = "tf32_hc_prenorm_gemm"
PARAMS = Params(
    "HcParams",
    Field("map_a", Kind.MAP),
    Field("map_b", Kind.MAP),
    Field("d", Kind.POINTER),
    Field("sqr_sum", Kind.POINTER),
    Field("d_pitch", Kind.UINT64),
    Field("d_stride", Kind.UINT64),
    Field("m", Kind.UINT32),
    Field("k_blocks", Kind.UINT32),
    Field("splits", Kind.UINT32),
    Field("tiles_n", Kind.UINT32),
    Field("units", Kind.UINT32),
    Field("slot_bytes", Kind.UINT32),
)
"""`HcParams` of cuda/hc_prenorm.cuh."""
MAX_MAPS = 1024
PRODUCT_K = 16
"""Elements along k of one product of BF16."""

Config = HcConfig | HcFewConfig

__all__ = [
    "NAME",
    "PARAMS",
    "SOURCE",
    "Config",
    "build",
    "code_plan",
    "fits",
    "grid",
    "headers",
    "kernel_of",
    "params_of",
    "reachable",
    "run",
    "usual_hc",
]


def kernel_of(config: Config) -> Any:
    """The module of a configuration's kernel: this one, or that for few rows."""
    return hc_prenorm_few if isinstance(config, HcFewConfig) else sys.modules[__name__]


def run(p: HcProblem, config: Config | None = None) -> None:
    """Compute the product and the sums of squares on the GPU that the operands are on."""
    device = p.a.get_device()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(p, config)
        return
    m, n, k, splits = p.sizes
    all_sms = gpu_of(device).num_sms
    num_sms = num_sms_of(all_sms)
    if config is None:
        how = (m, n, k, splits, num_sms, get_batch_invariant())
        leaves_sms = num_sms < all_sms
        config = select_hc(*how, leaves_sms=leaves_sms)
        if config.cluster > driver.PORTABLE_CLUSTER and not fits(config, device):
            config = select_hc(*how, driver.PORTABLE_CLUSTER, leaves_sms)
    kernel = kernel_of(config)
    launcher = kernel.launcher_of(config, device, get_pdl())
    if get_compile_mode() == 0:
        launch(launcher, kernel.params_of(config, launcher, p), kernel.grid(config, m, n, splits, num_sms), device)


def params_of(config: HcConfig, launcher: driver.Launcher, p: HcProblem) -> bytes:
    """Give the kernel's parameters."""
    m, n, k, splits = p.sizes
    rows = min(config.block_m, m)
    map_a = matrix_map(ElementType.BFLOAT16, p.a, (rows, BLOCK_K), 128)
    map_b = matrix_map(ElementType.FLOAT32, p.b, (config.block_n, BLOCK_K), 0)
    return PARAMS.pack(
        {
            "map_a": _encoded(launcher, map_a, p.a.data_ptr()),
            "map_b": _encoded(launcher, map_b, p.b.data_ptr()),
            "d": p.d.data_ptr(),
            "sqr_sum": p.sqr_sum.data_ptr(),
            "d_pitch": p.d.stride(1),
            "d_stride": p.d.stride(0) if splits > 1 else 0,
            "m": m,
            "k_blocks": k // BLOCK_K,
            "splits": splits,
            "tiles_n": n // config.block_n,
            "units": units(config, m, n, splits),
            "slot_bytes": rows * BLOCK_K * 2 + config.block_n * BLOCK_K * 4,
        }
    )


@lru_cache(MAX_MAPS)
def _encoded(launcher: driver.Launcher, tensor_map: TensorMap, address: int) -> bytes:
    """Encode a map. Allocators give the same addresses again and again."""
    return launcher.encode(tensor_map, address, address)


def headers(config: HcConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {
        **cuda_sources(),
        "config.cuh": generated(config.header()),
        PARAMS.header_name: PARAMS.layout_header(),
        "wgmma_shapes.cuh": wgmma_bf16_header([2 * config.block_n]),
    }


def build(config: HcConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    return jit.build(SOURCE, headers(config), name=NAME)


def code_plan(config: HcConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of. It writes sums by ordinary stores."""
    return CodePlan(
        roles=((config.num_math_warps * 32 * config.teams, None), (32, None)),
        shared_bytes=config.shared_bytes,
        qgmma=0,
        hgmma=BLOCK_K // PRODUCT_K,
        tma_loads=2,
        multicast_loads=0,
    )


@cache
def loaded(config: HcConfig, device: int) -> driver.Kernel:
    """Get the kernel of a configuration on a device, compiled and loaded at first need."""
    return driver.Kernel(build(config), config.shared_bytes)


@cache
def launcher_of(config: HcConfig, device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way a configuration is launched on a device."""
    kernel = loaded(config, device)
    return driver.Launcher(kernel, PARAMS.size, config.num_threads, config.cluster, is_dependent=is_dependent)


@cache
def fits(config: Config, device: int) -> bool:
    """Ask whether a device, which is the current one, has room for a cluster of more CTAs than every GPU runs."""
    kernel = kernel_of(config)
    kernel.launcher_of(config, device, get_pdl())  # the driver wants to know first that the size is meant
    return driver.clusters_at_once(kernel.loaded(config, device), config.num_threads, config.cluster) > 0
