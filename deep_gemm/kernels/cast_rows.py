"""The kernel of cuda/cast_rows.cuh: how it is compiled for a configuration, and launched for a matrix."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .. import jit
from ..choose.config_cast import CastConfig, num_ctas, select_cast
from ..jit import driver
from ..problem.layout import ADDRESS_ALIGNMENT
from ..settings import get_compile_mode, get_num_sms, get_pdl
from .code_plan import CodePlan
from .launch import launch
from .params import Field, Kind, Params
from .sources import cuda_sources

SOURCE = '#include "cast_rows.cuh"\n'
NAME = "cast_rows"
PARAMS = Params(
    "CastParams",
    Field("x", Kind.POINTER),
    Field("values", Kind.POINTER),
    Field("scales", Kind.POINTER),
    Field("x_pitch", Kind.UINT64),
    Field("values_pitch", Kind.UINT64),
    Field("scales_stride_m", Kind.UINT64),
    Field("scales_stride_k", Kind.UINT64),
    Field("m", Kind.UINT32),
    Field("k", Kind.UINT32),
    Field("min_amax", Kind.FLOAT32),
    Field("rounds_up", Kind.UINT32),
)
"""`CastParams` of cuda/cast_rows.cuh."""


def run(x: Tensor, values: Tensor, scales: Tensor, min_amax: float, *, rounds_up: bool) -> None:
    """Cast the rows of `x` `[m, k]` on the GPU that it is on. All three lie on one device; `k` is contiguous."""
    if values.numel() == 0:
        return
    device, (m, k) = x.get_device(), x.shape
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            run(x, values, scales, min_amax, rounds_up=rounds_up)
        return
    config = select_cast(x.dtype, m, k, is_aligned=is_aligned(x, values), num_sms=get_num_sms())
    launcher = launcher_of(config, device, get_pdl())
    if get_compile_mode() == 0:
        launch(launcher, params_of(x, values, scales, min_amax, rounds_up=rounds_up), num_ctas(config, m, k), device)


def is_aligned(x: Tensor, values: Tensor) -> bool:
    """Tell whether lanes may load 16 bytes at once, and store what becomes of them."""
    elements = ADDRESS_ALIGNMENT // x.element_size()
    return (
        x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and values.data_ptr() % ADDRESS_ALIGNMENT == 0
        and x.shape[1] % elements == 0
        and (x.shape[0] == 1 or (x.stride(0) % elements == 0 and values.stride(0) % elements == 0))
    )


def params_of(x: Tensor, values: Tensor, scales: Tensor, min_amax: float, *, rounds_up: bool) -> bytes:
    """Give the kernel's parameters."""
    return PARAMS.pack(
        {
            "x": x.data_ptr(),
            "values": values.data_ptr(),
            "scales": scales.data_ptr(),
            "x_pitch": x.stride(0),
            "values_pitch": values.stride(0),
            "scales_stride_m": scales.stride(0),
            "scales_stride_k": scales.stride(1),
            "m": x.shape[0],
            "k": x.shape[1],
            "min_amax": min_amax,
            "rounds_up": int(rounds_up),
        }
    )


def headers(config: CastConfig) -> dict[str, str]:
    """Everything that the kernel's source includes, for one configuration."""
    return {**cuda_sources(), "config.cuh": config.header(), "cast_params_layout.cuh": PARAMS.layout_header()}


def build(config: CastConfig) -> jit.CompiledKernel:
    """Compile the kernel, or take it from the cache."""
    reason = config.why_illegal()
    if reason is not None:
        raise ValueError(f"config: {reason}, got {config}")
    return jit.build(SOURCE, headers(config), name=NAME)


def code_plan(config: CastConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of: ordinary loads and stores alone."""
    return CodePlan(
        roles=((config.num_threads, None),),
        shared_bytes=config.shared_bytes,
        qgmma=0,
        tma_loads=0,
        multicast_loads=0,
        ctas_per_sm=config.ctas_per_sm,
    )


@cache
def launcher_of(config: CastConfig, device: int, is_dependent: bool) -> driver.Launcher:
    """Get the way a configuration is launched on a device, compiled and loaded at first need."""
    kernel = driver.Kernel(build(config), config.shared_bytes)
    return driver.Launcher(kernel, PARAMS.size, config.num_threads, 1, is_dependent=is_dependent)
