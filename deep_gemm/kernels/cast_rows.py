"""The kernel of cuda/cast_rows.cuh: how it is compiled for a configuration, and launched for a matrix."""

from __future__ import annotations

from torch import Tensor

from ..choose.config_cast import CastConfig, num_ctas, select_cast
from ..gpus import gpu_of
from ..problem.layout import ADDRESS_ALIGNMENT
from ..settings import num_sms_of
from .launch import OrdinaryKernel
from .params import Field, Kind, Params

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
KERNEL: OrdinaryKernel[CastConfig] = OrdinaryKernel("cast_rows", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan


def run(x: Tensor, values: Tensor, scales: Tensor, min_amax: float, *, rounds_up: bool) -> None:
    """Cast the rows of `x` `[m, k]` on the GPU that it is on. All three lie on one device; `k` is contiguous."""
    if values.numel() == 0:
        return
    device, (m, k) = x.get_device(), x.shape
    num_sms = num_sms_of(gpu_of(device).num_sms)
    config = select_cast(x.dtype, m, k, is_aligned=is_aligned(x, values), num_sms=num_sms)
    KERNEL.run(config, params_of(x, values, scales, min_amax, rounds_up=rounds_up), num_ctas(config, m, k), device)


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
