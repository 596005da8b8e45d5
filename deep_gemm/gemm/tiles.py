"""The tiles that a dense product may be computed in: the choice is among them, and tables name them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ..core.check.layout import ceil_div
from ..core.check.recipes import PER_BLOCK, PER_ROW
from .config import BLOCK_K, GemmConfig
from .config_decode import DecodeConfig, decode_config
from .config_of_tile import tile_config
from .output import (
    FINE_OPERANDS,
    FP4_OPERANDS,
    OPERANDS_BY_ROW,
    OUTPUTS,
    USUAL_OPERANDS,
    Operands,
    Output,
    has_chunks,
)


@dataclass(frozen=True)
class Tile:
    """A tile that a kernel computes, and how CTAs of a cluster take part: what it is, not what it takes."""

    block_m: int
    block_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    cluster_k: int = 1
    is_decode: bool = False
    """True for the decode kernel; its tiles have `block_m` tokens."""
    crowd: int = 2
    """CTAs of the decode kernel on an SM."""

    @property
    def name(self) -> str:
        """Short, for people and tables, as configurations are called: "128x256/m2", "64x64/k5", "64x8/k3 2/SM"."""
        sides = {"m": self.cluster_m, "n": self.cluster_n, "k": self.cluster_k}
        cluster = "".join(f"/{side}{ctas}" for side, ctas in sides.items() if ctas > 1)
        if self.is_decode:  # columns first
            return f"{self.block_n}x{self.block_m}{cluster} {self.ctas_per_sm}/SM"
        return f"{self.block_m}x{self.block_n}{cluster}"

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def ctas_per_sm(self) -> int:
        """Say how many CTAs share an SM."""
        return self.crowd if self.is_decode else 1

    def config(self, output: Output, k: int) -> GemmConfig | DecodeConfig:
        """The kernel's configuration for this tile."""
        return _config(self, output, ceil_div(k, BLOCK_K) % BLOCKS_OF_RUNS)


def _splits(tile: Tile, *ctas: int) -> tuple[Tile, ...]:
    return tuple(replace(tile, cluster_k=cluster_k) for cluster_k in ctas)


BLOCKS_OF_RUNS = 4
"""All runs of k-blocks that a configuration may have divide this number."""
TILES = (
    Tile(64, 32),
    *_splits(Tile(64, 64), 1, 5),
    Tile(64, 96),
    Tile(64, 128),
    Tile(128, 64),
    Tile(128, 96),
    Tile(128, 112),
    Tile(128, 128),
    Tile(128, 160),
    Tile(128, 192),
    Tile(128, 256),
    Tile(128, 256, cluster_m=2),
    Tile(192, 96),
    Tile(192, 128),
    Tile(256, 128),
    *_splits(Tile(8, 64, is_decode=True), 1, 3, 8),
    *_splits(Tile(8, 128, is_decode=True), 1, 3),
    *_splits(Tile(16, 64, is_decode=True), 1, 4, 8),
    *_splits(Tile(16, 128, is_decode=True), 1, 3),
    *_splits(Tile(32, 64, is_decode=True), 1, 3, 5),
    Tile(32, 128, is_decode=True),
    *_splits(Tile(64, 64, is_decode=True), 3, 5),
)
"""Tiles, of more, without which products would take longer: leaving out others costs them 0.1%."""

TILES_PER_ROW = (
    *_splits(Tile(64, 64), 1, 3),
    *_splits(Tile(128, 128), 1, 2),
    Tile(192, 128),
    Tile(256, 128),
)
"""Tiles if B has a scale for each row (weight gradients): twice the FP32 instructions, and more registers."""
TILES_FP4 = (
    Tile(64, 64),
    *_splits(Tile(64, 128), 1, 2, 4),
    Tile(128, 64),
    Tile(128, 128),
    Tile(256, 128),
    *_splits(Tile(8, 64, is_decode=True, crowd=4), 1, 2, 4, 6),
    *_splits(Tile(16, 64, is_decode=True, crowd=3), 1, 2, 4),
    *_splits(Tile(16, 128, is_decode=True), 1, 4),
    *_splits(Tile(32, 64, is_decode=True, crowd=3), 1, 2, 4),
    *_splits(Tile(64, 64, is_decode=True), 1, 2),
    *_splits(Tile(64, 128, is_decode=True, crowd=1), 1, 2, 6),
)
"""Tiles if B is FP4."""
_FEW_FINE = (
    *_splits(Tile(8, 64, is_decode=True), 1, 3, 8),
    Tile(16, 64, is_decode=True),
    *_splits(Tile(32, 64, is_decode=True), 1, 3),
    Tile(64, 64, cluster_k=3, is_decode=True),
)
"""Few rows with fine scales. By cost.py most buy 3% where they are the best; 64x8 serves the batch invariant mode."""
TILES_CHUNKS = (*_splits(Tile(64, 128), 1, 2, 4), *_splits(Tile(128, 128), 1, 2), Tile(256, 128), *_FEW_FINE)
"""Tiles if blocks of B with a scale are smaller than 128 x 128: whether parts of k fold is asked of 128 columns."""
TILES_FINE = (Tile(64, 64), *_splits(Tile(64, 128), 1, 2, 4), *_splits(Tile(128, 128), 1, 2), *_FEW_FINE)
"""Tiles if other scales have fewer than 128 columns."""
TILES_OF: dict[Operands, tuple[Tile, ...]] = {
    USUAL_OPERANDS: TILES,
    OPERANDS_BY_ROW: TILES_PER_ROW,
    FP4_OPERANDS: TILES_FP4,
    **{each: TILES_CHUNKS if has_chunks(each) else TILES_FINE for each in FINE_OPERANDS},
}

OUTPUTS_OF = {
    (b, sfa, sfb): tuple(replace(output, b=b, sfa=sfa, sfb=sfb) for output in OUTPUTS) for b, sfa, sfb in TILES_OF
}
OUTPUTS_BY_NAME = {output.name: output for outputs in OUTPUTS_OF.values() for output in outputs}


@cache
def tiles_for(output: Output) -> tuple[Tile, ...]:
    """The tiles that there are for a kind of product: of those for its scales of B, all that can be built for it."""
    tiles = TILES_OF[output.operands]
    decodes = output in OUTPUTS_OF[output.operands]
    if output.operands in (USUAL_OPERANDS, OPERANDS_BY_ROW) and decodes:
        return tiles
    return tuple(
        tile for tile in tiles if (decodes if tile.is_decode else tile.config(output, BLOCK_K).why_illegal() is None)
    )


@cache
def tiles_by_name(output: Output) -> dict[str, Tile]:
    """Give the tiles by their names."""
    return {tile.name: tile for tile in tiles_for(output)}


@cache
def _config(tile: Tile, output: Output, blocks_left: int) -> GemmConfig | DecodeConfig:
    if tile.is_decode:
        adds = output.with_c or output.adds_to_d
        config = decode_config(
            tile.block_m,
            tile.block_n // 64,
            tile.cluster_k,
            tile.ctas_per_sm,
            fp32=output.is_fp32,
            c=adds,
            groups=output.groups,
            b=output.b,
            sfb=output.sfb or PER_BLOCK,
            sfa=output.sfa or PER_ROW,
        )
        if config is None:
            raise ValueError(f"tile: {tile} cannot be built")
        return config
    k = BLOCK_K * (BLOCKS_OF_RUNS + blocks_left)  # leaves the same tail as the problem's
    return tile_config(tile.block_m, tile.block_n, output, tile.cluster_m, tile.cluster_n, tile.cluster_k, k)
