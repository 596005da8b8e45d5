"""The kernel of casts/cast_depths.cuh, which casts columns within groups of rows: its configurations and launch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.check.checks import K_MULTIPLE
from ..core.check.layout import SCALE_BLOCK, ceil_div
from ..core.kernel import Config, Kernel
from .cast_rows import block_reciprocal
from .cast_tiles import Grain, TileCastConfig
from .config import INPUTS, VECTOR_BYTES, operands, pitch, vector_of

WEIGHTED = (torch.bfloat16, torch.float32)
"""Types of rows that the kernel can multiply by weights."""


class Source(Enum):
    """The numbers that are cast. A value is (file of casts/cast, whether rows are multiplied by their weights)."""

    TOKENS = "columns_of_tokens", False
    """Tokens: each row of a group is the token of the row's route."""
    WEIGHTED = "columns_of_tokens", True
    """Tokens, each multiplied by the weight of its row."""
    SILU = "columns_of_silu", True
    """s = silu(gate) * up, and the gradient of gate and up. The gradient is cast along rows too."""
    SILU_AT_ONCE = "columns_of_silu_at_once", True
    """Like SILU, if gate and up each have a multiple of 128 columns: each of their elements is loaded only once."""
    SILU_ROWS = "rows_of_silu", True
    """The gradient of gate and up, and s times the weight of its row, only along rows and in BF16."""


OF_SILU = (Source.SILU, Source.SILU_AT_ONCE, Source.SILU_ROWS)


@dataclass(frozen=True)
class DepthsCastConfig(Config):
    """One configuration of `cast_depths`: a CTA casts a 128x128 tile of a group, or three tiles with `SILU_AT_ONCE`."""

    dtype: torch.dtype
    source: Source
    ctas_per_sm: int = 2
    num_threads: int = 2 * SCALE_BLOCK

    @property
    def name(self) -> str:
        """Short description for people, such as "weighted bfloat16"."""
        return f"{self.source.name.lower()} {str(self.dtype).removeprefix('torch.')}"

    @property
    def tile(self) -> TileCastConfig:
        """The tile that a CTA casts."""
        grain = Grain.ROWS if self.source in OF_SILU else None
        return TileCastConfig(self.dtype, vector_of(self.dtype, True), grain, VECTOR_BYTES, self.ctas_per_sm)

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in casts/cast_depths.cuh, which asserts the same size."""
        tile = self.tile.shared_bytes
        if self.source == Source.SILU_AT_ONCE:  # gate, up and ds
            tile = 3 * SCALE_BLOCK * SCALE_BLOCK * self.dtype.itemsize
        if self.source == Source.SILU_ROWS:
            tile = 16
        return tile + 4 * 4 + self.num_threads // 32 * 2 * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs for a configuration that the kernel can be built for."""
        yield from self.tile.rules()
        yield self.num_threads == self.tile.num_threads, "a thread for each row and each column of a tile"
        yield self.source not in OF_SILU or self.dtype == torch.bfloat16, "gate and up in BF16, as products give them"
        yield (
            self.source == Source.TOKENS or self.dtype != torch.float16,
            "no FP16 times weights: small ones would be zero",
        )

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source reads."""
        return {**self.tile.constants(), "kIsWeighted": self.source.value[1], "kSharedBytes": self.shared_bytes}

    def choices(self) -> dict[str, str]:
        """Return the file that the source includes."""
        return {"SOURCE": f"cast/{self.source.value[0]}.cuh"}


@cache
def depths_cast_config(dtype: torch.dtype, source: Source) -> DepthsCastConfig:
    """Choose the configuration for rows of a type. An FP32 tile fills half of the registers, as gate, up and ds do."""
    is_large = dtype == torch.float32 or source in OF_SILU
    return DepthsCastConfig(dtype, source, 4 if source == Source.SILU_ROWS else 2 if is_large else 3)


def reachable_depths_casts() -> list[DepthsCastConfig]:
    """List every configuration of `cast_depths` that a cast may choose."""
    weighted = [depths_cast_config(dtype, Source.WEIGHTED) for dtype in WEIGHTED]
    of_tokens = [depths_cast_config(dtype, Source.TOKENS) for dtype in INPUTS]
    return [*of_tokens, *weighted, *(depths_cast_config(torch.bfloat16, source) for source in OF_SILU)]


KERNEL: Kernel[DepthsCastConfig] = Kernel("cast_depths", "DepthsCastParams", reachable_depths_casts)


class DepthsCast(NamedTuple):
    """The inputs and outputs of a cast. All tensors are on one device. Rows of x and ds are aligned to 16 bytes."""

    x: Tensor
    """`[tokens, k]`; with `ds`, BF16 `[rows, k]`: gate and up side by side."""
    ends: Tensor
    """int32 `[groups]`: the index behind each group's last row. Groups follow each other without gaps."""
    rows: int
    """The most rows of all groups together."""
    token_of: Tensor | None = None
    """int32 `[rows]`: the token of each row of a group."""
    row_weights: Tensor | None = None
    """FP32 `[rows]`."""
    columns: Tensor | None = None
    """Memory for the transposed values of all groups: k times the sum of the depths."""
    column_scales: Tensor | None = None
    """`[k, blocks of 128 rows]`; the scales of a block are contiguous."""
    ds: Tensor | None = None
    """BF16 `[rows, k / 2]`"""
    values: Tensor | None = None
    """`[rows, k]`: the gradient of gate and up along rows. It needs `columns` too, unless it is BF16."""
    scales: Tensor | None = None
    """`[rows, ceil(k / 128)]`; the scales of a block of columns are contiguous."""
    activated: Tensor | None = None
    """Memory for the transposed activation, k / 2 times the sum of the depths; or BF16 `[rows, k / 2]`, weighted."""
    activated_scales: Tensor | None = None
    """`[k / 2, blocks of 128 rows]`, laid out like `column_scales`."""
    sums: Tensor | None = None
    """FP32 `[ceil(k / 2 / 128), rows]`: the sum of activation times `ds` for each row and 128 columns."""
    limit: float | None = None


def run(p: DepthsCast) -> None:
    """Cast on the GPU of x."""
    ctas = grid(p) if p.rows > 0 else 0
    if ctas != 0:
        KERNEL.run(config_of(p), values_of(p), ctas, p.x.get_device())


def config_of(p: DepthsCast) -> DepthsCastConfig:
    """Choose the configuration."""
    if p.ds is not None:
        source = Source.SILU_AT_ONCE if p.ds.shape[1] % SCALE_BLOCK == 0 else Source.SILU
        if torch.bfloat16 in (x.dtype for x in (p.values, p.activated) if x is not None):
            source = Source.SILU_ROWS
    else:
        source = Source.TOKENS if p.row_weights is None else Source.WEIGHTED
    return depths_cast_config(p.x.dtype, source)


def room_of(rows: int, groups: int) -> tuple[int, int]:
    """Return the largest sum of aligned depths, and the most blocks of 128 rows, for any ends of the groups.

    >>> room_of(40, 2)  # 1 and 39 rows: depths 16 and 48
    (64, 2)
    """
    some = min(groups, rows)
    return (rows + some * (K_MULTIPLE - 1)) // K_MULTIPLE * K_MULTIPLE, (rows - some) // SCALE_BLOCK + some


def tiles_of(p: DepthsCast) -> tuple[int, int]:
    """Count tiles along columns: first of x or the gradient, then of the activation, or of both if a CTA casts both."""
    k = p.x.shape[1]
    if config_of(p).source in (Source.SILU_AT_ONCE, Source.SILU_ROWS):
        return 0, ceil_div(k // 2, SCALE_BLOCK)
    of_x, of_activation = ceil_div(k, SCALE_BLOCK), ceil_div(k // 2, SCALE_BLOCK)
    return of_x if p.columns is not None else 0, of_activation if p.activated is not None else 0


def grid(p: DepthsCast) -> int:
    """Count CTAs: one for each tile that the groups may have."""
    return room_of(p.rows, p.ends.numel())[1] * sum(tiles_of(p))


def values_of(p: DepthsCast) -> dict[str, Any]:
    """Return the values of the kernel's parameters by member."""
    of_gradient, of_activation = tiles_of(p)
    tiles = of_gradient + of_activation
    return {
        **operands(KERNEL.params, p),
        "x_pitch": pitch(p.x, 0),
        "ds_pitch": pitch(p.ds, 0),
        "stride_of_block": pitch(p.column_scales, 1),
        "activated_stride_of_block": pitch(p.activated_scales, 1),
        "scales_stride_k": pitch(p.scales, 1),
        "rows": p.rows,
        "k": p.x.shape[1],
        "room": room_of(p.rows, p.ends.numel())[0],
        "num_groups": p.ends.numel(),
        "tiles": tiles,
        "reciprocal": block_reciprocal(tiles * SCALE_BLOCK),
        "gradient_tiles": of_gradient,
        "limit": math.inf if p.limit is None else p.limit,
    }
