"""The kernel of casts/cast_tiles.cuh: how it is compiled for a configuration, and launched for a matrix."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..core.check.layout import ADDRESS_ALIGNMENT
from ..core.kernel import Kernel
from ..core.params import Field, Kind, Params
from .cast_rows import SCALE_BYTES, block_reciprocal, is_aligned
from .config import Grain, TileCastConfig, num_tiles, reachable_tile_casts, tile_cast_config

PARAMS = Params(
    "TileCastParams",
    Field("x", Kind.POINTER),
    Field("values", Kind.POINTER),
    Field("columns", Kind.POINTER),
    Field("scales", Kind.POINTER),
    Field("column_scales", Kind.POINTER),
    Field("x_pitch", Kind.UINT32),
    Field("values_pitch", Kind.UINT32),
    Field("columns_pitch", Kind.UINT32),
    Field("scales_stride_m", Kind.UINT32),
    Field("scales_stride_k", Kind.UINT32),
    Field("column_scales_stride_m", Kind.UINT32),
    Field("column_scales_stride_k", Kind.UINT32),
    Field("m", Kind.UINT32),
    Field("k", Kind.UINT32),
    Field("block_reciprocal", Kind.UINT32),
    Field("min_amax", Kind.FLOAT32),
    Field("rounds_up", Kind.UINT32),
)
"""`TileCastParams` of casts/cast_tiles.cuh."""
KERNEL: Kernel[TileCastConfig] = Kernel("cast_tiles", PARAMS, reachable_tile_casts)


class TileCast(NamedTuple):
    """A cast: what is cast, and to where. All tensors lie on one device; x and values are contiguous in rows."""

    x: Tensor
    """`[m, k]`."""
    grain: Grain | None
    """The part of `values` that has a scale."""
    values: Tensor | None
    """`[m, k]`, if there is a grain."""
    scales: Tensor | None
    """The scales of `values`: as many rows and columns as there are, 128 of them together where a scale is theirs."""
    columns: Tensor | None = None
    """`[k, m]`: the transposed values."""
    column_scales: Tensor | None = None
    """`[k, ceil(m / 128)]`, if there are columns."""
    min_amax: float = 0.0
    rounds_up: bool = False


def run(p: TileCast) -> None:
    """Cast on the GPU on which x is."""
    if p.x.numel() > 0:
        KERNEL.run(config_of(p), params_of(p), num_tiles(*p.x.shape), p.x.get_device())


def config_of(p: TileCast) -> TileCastConfig:
    """Choose the configuration: lanes load and store 16 bytes at once where everything lies so that they may."""
    columns = p.columns
    return tile_cast_config(
        p.x.dtype,
        p.grain,
        with_columns=columns is not None,
        is_aligned=is_aligned(p.x, p.x if p.values is None else p.values),
        has_aligned_columns=columns is None
        or all(n % ADDRESS_ALIGNMENT == 0 for n in (columns.data_ptr(), columns.stride(0), p.x.shape[0])),
    )


def params_of(p: TileCast) -> bytes:
    """Give the kernel's parameters."""
    (m, k), values, scales, columns, of_columns = p.x.shape, p.values, p.scales, p.columns, p.column_scales
    return PARAMS.pack(
        {
            "x": p.x.data_ptr(),
            "values": 0 if values is None else values.data_ptr(),
            "columns": 0 if columns is None else columns.data_ptr(),
            "scales": 0 if scales is None else scales.data_ptr(),
            "column_scales": 0 if of_columns is None else of_columns.data_ptr(),
            "x_pitch": p.x.stride(0) * p.x.element_size(),
            "values_pitch": 0 if values is None else values.stride(0),
            "columns_pitch": 0 if columns is None else columns.stride(0),
            "scales_stride_m": 0 if scales is None else scales.stride(0) * SCALE_BYTES,
            "scales_stride_k": 0 if scales is None else scales.stride(1) * SCALE_BYTES,
            "column_scales_stride_m": 0 if of_columns is None else of_columns.stride(1) * SCALE_BYTES,
            "column_scales_stride_k": 0 if of_columns is None else of_columns.stride(0) * SCALE_BYTES,
            "m": m,
            "k": k,
            "block_reciprocal": block_reciprocal(k),
            "min_amax": p.min_amax,
            "rounds_up": int(p.rounds_up),
        }
    )
