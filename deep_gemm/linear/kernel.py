"""The kernel of linear_decode.cuh: how it is compiled for a configuration, and launched for a layer's few rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..core import jit, settings
from ..core.check.checks import Operand
from ..core.check.layout import ADDRESS_ALIGNMENT, align
from ..core.code_plan import CodePlan
from ..core.gpu import gpu_of, is_hopper
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import launch
from ..core.params import Field, Kind, Params
from ..core.settings import get_compile_mode, get_pdl
from ..core.sm90 import WARPGROUP_THREADS, WGMMA_K
from ..core.sources import cuda_sources, generated
from ..core.wgmma_header import wgmma_header
from ..gemm import kernel_decode as fp8_gemm_decode
from ..gemm.config import BLOCK_K
from ..gemm.config_decode import BLOCK_TOKENS, DecodeConfig
from ..gemm.dense import launch as dense
from ..gemm.dense.choose import reachable_decode
from ..gemm.maps import matrix_map
from ..gemm.output import Output
from .config import CASTERS, MAX_CLUSTER_N, MAX_ROWS, LinearDecodeConfig, linear_decode_config, serving

SOURCE = '#include "linear_decode.cuh"\n'
NAME = "fp8_gemm_linear_decode"
PARAMS = Params(
    "LinearParams",
    Field("map_b", Kind.MAP),
    Field("x", Kind.POINTER),
    Field("sfb", Kind.POINTER),
    Field("d", Kind.POINTER),
    Field("c", Kind.POINTER),
    Field("d_pitch", Kind.UINT64),
    Field("c_pitch", Kind.UINT64),
    Field("x_pitch", Kind.UINT32),
    Field("sfb_stride_n", Kind.UINT32),
    Field("sfb_stride_k", Kind.UINT32),
    Field("m", Kind.UINT32),
    Field("n", Kind.UINT32),
    Field("k", Kind.UINT32),
    Field("slot_bytes", Kind.UINT32),
)
"""`LinearParams` of linear/linear_decode.cuh."""
MAX_CHOICES = 4096
PITCH_LIMIT = 1 << 32
"""Bytes between rows of x are a number of 32 bits."""


def run(x: Tensor, w: Operand, d: Tensor, c: Tensor | None) -> bool:
    """Compute D = C + cast(x) @ w.T in one launch, if rows are few; else tell that nothing was done.

    All of it was checked. C is BF16, D itself or apart from it, and may be one row for all, with a stride of zero.
    """
    if not serves(x, d):
        return False
    device, (values, scales) = x.get_device(), w
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return run(x, w, d, c)
    config = config_of(*d.shape, x.shape[1], c is not None, device, settings.in_force.generation)
    if config is None:
        return False
    launcher = launcher_of(config, device, get_pdl())
    if get_compile_mode() == 0:
        ctas = grid(config, *d.shape)
        launch(launcher, params_of(config, launcher, x, values, scales, d, c), ctas, device)
    return True


def serves(x: Tensor, d: Tensor) -> bool:
    """Tell whether the kernel may cast these rows: a few in BF16, that begin where 16 bytes may."""
    m, k = x.shape
    return (
        0 < m <= MAX_ROWS
        and k > 0
        and x.dtype == d.dtype == torch.bfloat16
        and d.shape[1] > 0
        and x.is_cuda
        and is_hopper(x.get_device())
        and x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and x.stride(1) == 1
        and (m == 1 or x.stride(0) * x.element_size() in range(0, PITCH_LIMIT, ADDRESS_ALIGNMENT))
    )


@lru_cache(MAX_CHOICES)
def config_of(m: int, n: int, k: int, with_c: bool, device: int, generation: int) -> LinearDecodeConfig | None:
    """Give the configuration that cuts k as the product does, for one order of sums; None if it is another kernel's.

    `generation` says which settings are in force.
    """
    config = dense.choice(m, n, k, Output(with_c=with_c), gpu_of(device))
    return serving(m, k, config) if isinstance(config, DecodeConfig) else None


def reachable_linear() -> list[LinearDecodeConfig]:
    """Every configuration that `config_of` can give."""
    tiles = [
        replace(tile, block_tokens=tokens)
        for tile in reachable_decode()
        for tokens in BLOCK_TOKENS
        if tokens <= MAX_ROWS and not tile.is_fp32
    ]
    found = [linear_decode_config(tile, cluster_n) for tile in tiles for cluster_n in (1, 2, MAX_CLUSTER_N)]
    return list(dict.fromkeys(config for config in found if config is not None))


def grid(config: LinearDecodeConfig, m: int, n: int) -> int:
    """A cluster for each tile of D, or for as many beside each other as share out the cast."""
    return align(fp8_gemm_decode.grid(config.tile, m, n), config.cluster)


def params_of(
    config: LinearDecodeConfig,
    launcher: driver.Launcher,
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    d: Tensor,
    c: Tensor | None,
) -> bytes:
    """Give the kernel's parameters."""
    (m, n), k = d.shape, x.shape[1]
    rows = min(config.tile.block_n, n)
    return PARAMS.pack(
        {
            "map_b": _encoded(launcher, matrix_map(ElementType.UINT8, values, (rows, BLOCK_K), 128), values.data_ptr()),
            "x": x.data_ptr(),
            "sfb": scales.data_ptr(),
            "d": d.data_ptr(),
            "c": 0 if c is None else c.data_ptr(),
            "x_pitch": x.stride(0) * x.element_size() if m > 1 else 0,
            "d_pitch": d.stride(0),
            "c_pitch": 0 if c is None else c.stride(0),
            "sfb_stride_n": scales.stride(0),
            "sfb_stride_k": scales.stride(1),
            "m": m,
            "n": n,
            "k": k,
            "slot_bytes": rows * BLOCK_K,
        }
    )


@lru_cache(MAX_CHOICES)
def _encoded(launcher: driver.Launcher, tensor_map: TensorMap, address: int) -> bytes:
    """Encode the map of a weight, which stays where it is from call to call."""
    return launcher.encode(tensor_map, address, address)


def headers(config: LinearDecodeConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {
        **cuda_sources(),
        "config.cuh": generated(config.header()),
        "linear_params_layout.cuh": PARAMS.layout_header(),
        "wgmma_shapes.cuh": wgmma_header([config.tile.block_tokens]),
    }


def build(config: LinearDecodeConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    passes = jit.passes_for(config.num_threads * config.tile.ctas_per_sm)
    return jit.build(SOURCE, headers(config), name=NAME, passes=passes)


def code_plan(config: LinearDecodeConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of. It writes D by ordinary stores."""
    tile = config.tile
    return CodePlan(
        roles=((32, None), (WARPGROUP_THREADS * tile.num_math_warpgroups, None), (CASTERS, None)),
        shared_bytes=config.shared_bytes,
        qgmma=BLOCK_K // WGMMA_K,
        tma_loads=1,  # B
        multicast_loads=0,
        ctas_per_sm=tile.ctas_per_sm,
    )


@cache
def launcher_of(config: LinearDecodeConfig, device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way a configuration is launched on a device, compiled and loaded at first need."""
    kernel = driver.Kernel(build(config), config.shared_bytes)
    return driver.Launcher(kernel, PARAMS.size, config.num_threads, config.cluster, is_dependent=is_dependent)
