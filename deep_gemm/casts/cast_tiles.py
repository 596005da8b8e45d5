"""The kernel of casts/cast_tiles.cuh, which casts tiles: its configurations, the choice of one, and its launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.check.layout import ADDRESS_ALIGNMENT, SCALE_BLOCK, align, ceil_div
from ..core.kernel import Config, Kernel
from .cast_rows import block_reciprocal, is_aligned
from .config import INPUTS, VECTOR_BYTES, cast_constants, lanes_of, operands, pitch, vector_of
from .rules import FP8, Target


class Grain(Enum):
    """The part of a tile that shares a scale, for values `[m, k]` like x. A member's value is a switch of the kernel.

    Except for ROWS, 128 may also be 64 or 32.
    """

    ROWS = "kCastsRows"
    """Each row and 128 columns."""
    CHANNELS = "kCastsChannels"
    """Each column and 128 rows."""
    BLOCKS = "kCastsBlocks"
    """Each 128x128 block. With `column_bytes`, the cast also writes transposed values, for each matrix separately. Then
    values `[m, k]` may be left out."""


@dataclass(frozen=True)
class TileCastConfig(Config):
    """One configuration of `cast_tiles`: a CTA casts a 128x128 tile."""

    dtype: torch.dtype
    vector: int
    """Elements that a lane loads at once: 16 bytes, or one element if rows are not aligned to 16 bytes."""
    grain: Grain | None
    """The part that shares a scale of values `[m, k]`; None if the cast does not write `values`."""
    column_bytes: int
    """Bytes of transposed values that a lane stores at once: 16, or 1 if not aligned. 0: no transposed values."""
    ctas_per_sm: int = 2
    num_threads: int = 256
    block: int = SCALE_BLOCK
    """Rows under a scale; for blocks also the columns."""

    @property
    def name(self) -> str:
        """Short description for people, such as "rows, columns by 16, bfloat16 by 8"."""
        parts = [self.grain.name.lower()] if self.grain else []
        parts += [f"columns by {self.column_bytes}"] if self.column_bytes else []
        parts += [f"a scale for {self.block}"] if self.block != SCALE_BLOCK else []
        return ", ".join([*parts, f"{str(self.dtype).removeprefix('torch.')} by {self.vector}"])

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in casts/cast_tiles.cuh, which asserts the same size."""
        lanes = lanes_of(self.vector)
        parts = SCALE_BLOCK // self.block
        has_columns = self.grain == Grain.CHANNELS or (self.column_bytes > 0 and not turns_blocks(self))
        teams = self.num_threads // lanes if has_columns else 1
        columns = (SCALE_BLOCK if self.column_bytes else 1) * SCALE_BLOCK
        keys = teams * SCALE_BLOCK * self.dtype.itemsize
        divisors = (1 + (parts if has_columns else 1)) * SCALE_BLOCK * 8
        return align(columns + keys + divisors + self.num_threads // 32 * parts * 4, 16)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs for a configuration that the kernel can be built for."""
        yield self.dtype in INPUTS, "BF16, FP16 or FP32"
        yield self.vector in (1, VECTOR_BYTES // self.dtype.itemsize), "16 bytes, or one element, at once"
        yield self.column_bytes in (0, 1, VECTOR_BYTES), "16 bytes, or one, of columns at once"
        yield self.grain is not None or self.column_bytes > 0, "an output"
        yield self.grain != Grain.CHANNELS or self.column_bytes == 0, "columns alone, beside rows or of blocks"
        is_whole = self.column_bytes == VECTOR_BYTES and self.vector > 1 and self.block == SCALE_BLOCK
        yield (not turns_blocks(self) or is_whole, "16 bytes at once, and 128 rows under a scale, of transposed blocks")
        yield self.grain != Grain.ROWS or self.column_bytes > 0, "columns beside rows, which cast_rows casts alone"
        yield self.block in FP8.blocks, "32, 64 or 128 rows under a scale"
        yield self.grain != Grain.ROWS or self.block == SCALE_BLOCK, "128 columns under a scale of rows"
        yield self.num_threads == 2 * SCALE_BLOCK, "a thread for each row and each column of a tile"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source reads."""
        return {
            **cast_constants(self, "column_bytes", "shared_bytes"),
            "kScaleBlock": self.block,
            **{grain.value: grain == self.grain for grain in Grain},
        }


def turns_blocks(config: TileCastConfig) -> bool:
    """Tell whether blocks are cast and transposed."""
    return config.grain == Grain.BLOCKS and config.column_bytes > 0


@cache
def tile_cast_config(
    dtype: torch.dtype,
    grain: Grain | None,
    with_columns: bool,
    is_aligned: bool,
    has_aligned_columns: bool = True,
    block: int = SCALE_BLOCK,
) -> TileCastConfig:
    """Choose the configuration of `cast_tiles` for rows of a type.

    `is_aligned`: lanes may load 16 bytes of x at once, and store the values of these elements at once.
    `has_aligned_columns`: rows of the transposed values are aligned to 16 bytes.
    """
    column_bytes = (VECTOR_BYTES if has_aligned_columns else 1) if with_columns else 0
    vector = vector_of(dtype, is_aligned)
    # A tile in FP32 fills half of the registers. Loads of single elements need more registers than loads of vectors.
    ctas_per_sm = (4 if grain is None else 3) if dtype != torch.float32 else 2
    if vector == 1:
        ctas_per_sm = ctas_per_sm // 2
    return TileCastConfig(dtype, vector, grain, column_bytes, ctas_per_sm, block=block)


def reachable_tile_casts() -> list[TileCastConfig]:
    """List every configuration of `cast_tiles` that a cast may choose."""
    outputs = [(Grain.ROWS, True), (None, True), (Grain.CHANNELS, False), (Grain.BLOCKS, False)]
    found = [
        tile_cast_config(dtype, grain, with_columns, is_aligned, has_aligned_columns, block)
        for dtype in INPUTS
        for grain, with_columns in outputs
        for is_aligned in (True, False)
        for has_aligned_columns in ((True, False) if with_columns else (True,))
        for block in ((SCALE_BLOCK,) if grain == Grain.ROWS else FP8.blocks)
    ]
    return found + [tile_cast_config(dtype, Grain.BLOCKS, with_columns=True, is_aligned=True) for dtype in INPUTS]


KERNEL: Kernel[TileCastConfig] = Kernel("cast_tiles", "TileCastParams", reachable_tile_casts)


class TileCast(NamedTuple):
    """The inputs and outputs of a cast. All tensors are on one device. The rows of x and of values are contiguous."""

    x: Tensor
    """`[m, k]`. If blocks are transposed, it has the rows of all matrices."""
    to: Target
    """The cast that makes `values`; without `values`, the cast of each row of `columns`."""
    values: Tensor | None = None
    """`[m, k]`; may be None if blocks are transposed."""
    scales: Tensor | None = None
    """Scales of `values`; if blocks are transposed, scales of the blocks."""
    columns: Tensor | None = None
    """The transposed values `[k, m]`; if blocks are transposed, `[matrices, k, m]`."""
    column_scales: Tensor | None = None
    """Scales of `columns`, `[k, ceil(m / block)]`; None if blocks are transposed."""
    column_amaxes: Tensor | None = None
    """FP32 `[k]`: the largest magnitude of each whole column. Then a column has one scale, written by all its tiles."""

    @property
    def grain(self) -> Grain | None:
        """The part of `values` that shares a scale."""
        if self.scales is None:
            return None
        if self.to.rows == 1:
            return Grain.ROWS
        return Grain.CHANNELS if self.to.columns == 1 else Grain.BLOCKS


def run(p: TileCast) -> None:
    """Cast on the GPU of x."""
    if p.x.numel() != 0:
        KERNEL.run(config_of(p), values_of(p), grid(p), p.x.get_device())


def grid(p: TileCast) -> int:
    """Count CTAs: one for each 128x128 tile of each matrix."""
    matrices = 1 if p.columns is None or p.columns.dim() == 2 else p.columns.shape[0]
    return matrices * ceil_div(p.x.shape[0] // matrices, SCALE_BLOCK) * ceil_div(p.x.shape[1], SCALE_BLOCK)


def config_of(p: TileCast) -> TileCastConfig:
    """Choose the configuration: lanes load and store 16 bytes at once if all tensors are aligned."""
    columns = p.columns
    return tile_cast_config(
        p.x.dtype,
        p.grain,
        with_columns=columns is not None,
        is_aligned=is_aligned(p.x, p.x if p.values is None else p.values),
        has_aligned_columns=columns is None
        or all(n % ADDRESS_ALIGNMENT == 0 for n in (columns.data_ptr(), columns.stride(-2), columns.shape[-1])),
        block=p.to.block,
    )


def values_of(p: TileCast) -> dict[str, Any]:
    """Return the values of the kernel's parameters by member."""
    m, k = p.x.shape
    return {
        **operands(KERNEL.params, p),
        "x_pitch": pitch(p.x, 0),
        "values_pitch": pitch(p.values, 0),
        "columns_pitch": pitch(p.columns, -2),
        "scales_stride_m": pitch(p.scales, 0),
        "scales_stride_k": pitch(p.scales, 1),
        "column_scales_stride_m": pitch(p.column_scales, 1) if p.column_amaxes is None else 0,
        "column_scales_stride_k": pitch(p.column_scales, 0),
        "m": m if p.columns is None else p.columns.shape[-1],
        "k": k,
        "block_reciprocal": block_reciprocal(k),
        "min_amax": p.to.min_amax,
        "rounds_up": int(p.to.use_ue8m0),
    }
