"""The kernel of casts/cast_rows.cuh: how it is compiled for a configuration, and launched for a matrix."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, ceil_div
from ..core.gpu import gpu_of
from ..core.kernel import Kernel
from ..core.params import Field, Kind, Params
from ..core.settings import num_sms_of
from .config import CastConfig, Groups, num_ctas, reachable_cast, select_cast

SCALE_BYTES = 4
PARAMS = Params(
    "CastParams",
    Field("x", Kind.POINTER),
    Field("values", Kind.POINTER),
    Field("scales", Kind.POINTER),
    Field("sizes", Kind.POINTER),
    Field("row_weights", Kind.POINTER),
    Field("row_of", Kind.POINTER),
    Field("x_pitch", Kind.UINT32),
    Field("values_pitch", Kind.UINT32),
    Field("scales_stride_m", Kind.UINT32),
    Field("scales_stride_k", Kind.UINT32),
    Field("scales_stride_g", Kind.UINT32),
    Field("m", Kind.UINT32),
    Field("k", Kind.UINT32),
    Field("block_reciprocal", Kind.UINT32),
    Field("num_groups", Kind.UINT32),
    Field("alignment", Kind.UINT32),
    Field("topk", Kind.UINT32),
    Field("min_amax", Kind.FLOAT32),
    Field("limit", Kind.FLOAT32),
    Field("is_plain", Kind.UINT32),
    Field("rounds_up", Kind.UINT32),
)
"""`CastParams` of casts/cast_rows.cuh."""
KERNEL: Kernel[CastConfig] = Kernel("cast_rows", PARAMS, reachable_cast)


class RowCast(NamedTuple):
    """A cast: what is cast, and to where. All tensors lie on one device; x and values are contiguous in rows."""

    x: Tensor
    """`[m, k]`; `[m, 2 k]`, gate and up, if it is activated."""
    values: Tensor
    """`[m, k]`; `[rows of routes, k]` with `row_of`."""
    scales: Tensor
    """One for each row of values and 128 columns, by any strides; `[groups, rows, blocks]` with `counts`."""
    min_amax: float = 0.0
    rounds_up: bool = False
    activates: bool = False
    """silu(gate) * up is cast."""
    limit: float | None = None
    """gate counts as at most this, up as within +-this."""
    row_weights: Tensor | None = None
    """FP32 `[m]`: factors of activated rows."""
    counts: Tensor | None = None
    """int32 `[groups]`: the first rows of each m / groups that are cast."""
    ends: Tensor | None = None
    """int32 `[groups]`: groups follow each other, each from the end of the one before, aligned."""
    alignment: int = 1
    row_of: Tensor | None = None
    """int32 `[m, topk]`: the rows of values to which each row goes, -1 for none."""


def run(p: RowCast) -> None:
    """Cast on the GPU on which x is."""
    if p.x.numel() == 0 or p.values.numel() == 0:
        return
    device = p.x.get_device()
    num_sms = num_sms_of(gpu_of(device).num_sms)
    config = config_of(p, num_sms)
    KERNEL.run(config, params_of(p), num_ctas(config, p.x.shape[0], p.values.shape[1], num_sms), device)


def config_of(p: RowCast, num_sms: int) -> CastConfig:
    """Choose the configuration: lanes load 16 bytes at once where everything lies so that they may."""
    return select_cast(
        p.x.dtype,
        p.x.shape[0],
        p.values.shape[1],
        num_sms,
        is_aligned=is_aligned(p.x, p.values),
        activates=p.activates,
        groups=_groups_of(p),
        to_routes=p.row_of is not None,
    )


def _groups_of(p: RowCast) -> Groups:
    if p.counts is not None:
        return Groups.COUNTS
    if p.ends is not None:
        has_gaps = p.alignment > 1 or p.ends.numel() == 0
        return Groups.ENDS if has_gaps else Groups.UNTIL
    return Groups.NONE


def is_aligned(x: Tensor, values: Tensor) -> bool:
    """Tell whether lanes may load 16 bytes at once, and store what becomes of them."""
    elements = ADDRESS_ALIGNMENT // x.element_size()
    return (
        x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and values.data_ptr() % ADDRESS_ALIGNMENT == 0
        and values.shape[1] % elements == 0
        and (x.shape[0] == 1 or x.stride(0) % elements == 0)
        and (values.shape[0] == 1 or values.stride(0) % elements == 0)
    )


def block_reciprocal(k: int) -> int:
    """Give the number by which `BlockOfRows` of casts/cast/values.cuh divides by the blocks of a row."""
    return min((1 << 32) // ceil_div(k, SCALE_BLOCK), (1 << 32) - 1)


def params_of(p: RowCast) -> bytes:
    """Give the kernel's parameters."""
    (m, _), k, scales = p.x.shape, p.values.shape[1], p.scales
    sizes = p.ends if p.counts is None else p.counts
    # How much further away a group lies than if all rows were those of one matrix.
    further = scales.stride(0) - scales.shape[1] * scales.stride(1) if scales.dim() == 3 else 0
    return PARAMS.pack(
        {
            "x": p.x.data_ptr(),
            "values": p.values.data_ptr(),
            "scales": scales.data_ptr(),
            "sizes": 0 if sizes is None else sizes.data_ptr(),
            "row_weights": 0 if p.row_weights is None else p.row_weights.data_ptr(),
            "row_of": 0 if p.row_of is None else p.row_of.data_ptr(),
            "x_pitch": p.x.stride(0) * p.x.element_size() if m > 1 else 0,
            "values_pitch": p.values.stride(0) if p.values.shape[0] > 1 else 0,
            "scales_stride_m": scales.stride(-2) * SCALE_BYTES,
            "scales_stride_k": scales.stride(-1) * SCALE_BYTES,
            "scales_stride_g": further * SCALE_BYTES,
            "m": m,
            "k": k,
            "block_reciprocal": block_reciprocal(k),
            "num_groups": 0 if sizes is None else sizes.numel(),
            "alignment": p.alignment,
            "topk": 0 if p.row_of is None else p.row_of.shape[1],
            "min_amax": p.min_amax,
            "limit": math.inf if p.limit is None else p.limit,
            "is_plain": int(p.limit is None and p.row_weights is None),
            "rounds_up": int(p.rounds_up),
        }
    )
