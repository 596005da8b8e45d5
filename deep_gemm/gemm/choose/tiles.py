"""The tiles from which the tile of a product is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from ...core.check.layout import ceil_div
from ...core.check.recipes import E2M1, PER_64, PER_BLOCK, PER_ROW
from ..config.decode import DECODED, DecodeConfig, decode_config
from ..config.of_tile import tile_config
from ..config.tall import BLOCK_K, GemmConfig
from ..kinds.epilogues import TO_HEADS
from ..kinds.output import OPERANDS_BY_ROW, OPERANDS_OF, OUTPUTS_OF, USUAL_OPERANDS, Output
from ..kinds.works import DENSE


@dataclass(frozen=True)
class Tile:
    """A tile that a kernel computes, and the CTAs of a cluster. Stages and registers follow from it."""

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
        """Short name for people and tables: "128x256/m2", "64x64/k5", "64x8/k3 2/SM"."""
        sides = {"m": self.cluster_m, "n": self.cluster_n, "k": self.cluster_k}
        cluster = "".join(f"/{side}{ctas}" for side, ctas in sides.items() if ctas > 1)
        if self.is_decode:  # the name begins with columns
            return f"{self.block_n}x{self.block_m}{cluster} {self.ctas_per_sm}/SM"
        return f"{self.block_m}x{self.block_n}{cluster}"

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def ctas_per_sm(self) -> int:
        """Return the number of CTAs that share an SM."""
        return self.crowd if self.is_decode else 1

    def config(self, output: Output, k: int) -> GemmConfig | DecodeConfig:
        """Return the kernel's configuration for this tile."""
        return _config(self, output, ceil_div(k, BLOCK_K) % BLOCKS_OF_RUNS)


def _splits(tile: Tile, *ctas: int) -> tuple[Tile, ...]:
    return tuple(replace(tile, cluster_k=cluster_k) for cluster_k in ctas)


BLOCKS_OF_RUNS = 4
"""The length of every run of k-blocks that a configuration may have divides this number."""
TILES = (
    Tile(64, 32),
    *_splits(Tile(64, 64), 1, 5),
    *(Tile(64, n) for n in (96, 128)),
    *(Tile(128, n) for n in (64, 96, 112, 128, 160, 192, 256)),
    Tile(128, 256, cluster_m=2),
    *(Tile(192, n) for n in (96, 128)),
    Tile(256, 128),
    *_splits(Tile(8, 64, is_decode=True), 1, 3, 8),
    *_splits(Tile(8, 128, is_decode=True), 1, 3),
    *_splits(Tile(16, 64, is_decode=True), 1, 4, 8),
    *_splits(Tile(16, 128, is_decode=True), 1, 3),
    *_splits(Tile(32, 64, is_decode=True), 1, 3, 5),
    Tile(32, 128, is_decode=True),
    *_splits(Tile(64, 64, is_decode=True), 3, 5),
)
"""Tiles for products of usual operands, picked from a larger set: leaving out the others costs 0.1%."""

TILES_PER_ROW = (*_splits(Tile(64, 64), 1, 3), *_splits(Tile(128, 128), 1, 2), Tile(192, 128), Tile(256, 128))
"""Tiles if B has scales by row (weight gradients): promotion takes twice the FP32 instructions, more registers."""
TILES_FP4 = (
    Tile(64, 64),
    *_splits(Tile(64, 128), 1, 2, 4),
    *(Tile(128, n) for n in (64, 128)),
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
"""Tiles for few rows with fine scales. Most gain 3% where they are best, by cost.py; 64x8 is for batch invariance."""
TILES_CHUNKS = (*_splits(Tile(64, 128), 1, 2, 4), *_splits(Tile(128, 128), 1, 2), Tile(256, 128), *_FEW_FINE)
"""Tiles if a scale of B covers less than 128 x 128. Except in decode, all have 128 columns, so that they fold alike."""
TILES_FINE = (Tile(64, 64), *_splits(Tile(64, 128), 1, 2, 4), *_splits(Tile(128, 128), 1, 2), *_FEW_FINE)
"""Tiles if other scales cover fewer than 128 columns."""
OUTPUTS_BY_NAME = {output.name: output for operands in OPERANDS_OF[DENSE] for output in OUTPUTS_OF[operands]}

TILES_OF_HEADS = (
    *(Tile(64, n) for n in (64, 128)),
    *(Tile(128, n) for n in (64, 128, 192)),
    Tile(128, 256, cluster_n=2),
    Tile(128, 256, cluster_m=2),
    Tile(128, 256),
    Tile(256, 128),
    *_splits(Tile(8, 64, is_decode=True), 1, 2, 4),
    Tile(8, 128, is_decode=True),
    *_splits(Tile(16, 64, is_decode=True), 1, 2, 4),
    Tile(16, 128, is_decode=True),
    *_splits(Tile(32, 64, is_decode=True), 1, 2, 4),
    Tile(32, 128, is_decode=True),
    *_splits(Tile(64, 64, is_decode=True), 1, 2),
)
"""Tiles for heads. Heads make many tiles, so few tiles need a split of k, and none needs more than four parts.

If several tiles have the same cost, the first is chosen: on an H200 8 heads of 4096 x 1024 x 4096 take 1.2% less time
in pairs that share A, and 0.9% less in pairs that share B.
"""
HEADS_PER_ROW = (Tile(64, 64), Tile(128, 128), Tile(192, 128), Tile(256, 128))
ROWS = (Tile(64, 128), Tile(128, 128), Tile(128, 160), Tile(128, 192), Tile(128, 256))
ROWS_COUNTS = (*ROWS, Tile(256, 128))
"""Tiles for rows that are not stacked: one TMA box of 256 rows loads a tile's scales."""
HIGH_TILE = 128
"""The highest tile for groups of several tiles, if FP8 rows are not stacked. With higher tiles, the last of which is
cut, products took up to 29% longer on an H100."""
ROWS_PER_ROW = (Tile(64, 64), Tile(64, 128), Tile(128, 96))
"""Tiles if each row of B has its own scale: too few registers are left for 128 x 128."""
ROWS_FINE = (Tile(64, 128), Tile(128, 128))
"""Tiles if scales cover fewer than 128 columns."""
ROWS_CHUNKS = (*ROWS_FINE, Tile(256, 128))
"""Tiles if a scale of B covers less than 128 x 128, and one TMA box loads the scales of A."""
ROWS_FP4 = (Tile(64, 128), Tile(128, 64), Tile(128, 128))
"""Tiles if B is FP4: wider ones lack registers, as threads convert B; 256 rows need a BF16 D stored in order."""
FEW_FP4 = Tile(8, 64, is_decode=True, crowd=4)
"""The decode kernel's tile for FP4: on an H100 it gains 7 to 10% in groups of up to 8 rows; higher tiles none."""
FEW = (Tile(8, 64, is_decode=True), Tile(16, 128, is_decode=True))
"""The decode kernel's tiles for FP8: the low one for few tiles, the wide one for many tiles of few k-blocks."""
MOST_FEW = 16
"""The most rows of a group for FEW: each further tile of a group reads the weight again, from the L2."""
ROWS_SILU = (Tile(64, 128), Tile(128, 128), Tile(128, 256))
"""Tiles that activate: a warpgroup has 64 columns of gate and 64 of up, each in one block of B's scales."""
ROWS_APART = (Tile(64, 256), Tile(128, 256))
"""Tiles that activate if gate is apart from up: a warpgroup has both for the same columns, in two units."""
DEPTHS_TILES = (Tile(64, 64), Tile(128, 96), Tile(128, 128), Tile(256, 128))
LARGEST = DEPTHS_TILES[-1]
SHARING_A = replace(LARGEST, cluster_n=2)
"""The largest tile, computed by pairs of CTAs that share A."""
DEPTHS_TO_C = (*DEPTHS_TILES[:-1], SHARING_A)
"""Tiles if C is apart from D, or D is BF16. A pair computes the largest tile even if one column of tiles is left over,
which costs as much as two: with NVRTC 13.1 and later, the loading warp of a single CTA spills a register there."""


TILES_OF_SUMS = (Tile(64, 128), Tile(128, 128), Tile(128, 256, cluster_m=2), Tile(256, 128))
"""Tiles of whole blocks of columns, for a D with a sum for each block."""


@cache
def tiles_for(output: Output) -> tuple[Tile, ...]:
    """Give the tiles for a kind of product."""
    if output.epilogue.sums_blocks:
        return TILES_OF_SUMS
    if output.work.groups_rows:
        return _tiles_for_rows(output)
    if output.work.is_along_k:
        return DEPTHS_TO_C if wants_pairs(output) else (*DEPTHS_TILES, SHARING_A)
    if output.work.has_planes:
        return TILES_OF_HEADS if output.sfb == PER_BLOCK else HEADS_PER_ROW
    by_row = TILES_PER_ROW if output.sfb == PER_ROW else TILES
    tiles = TILES_CHUNKS if output.has_chunks else TILES_FINE if output.parts > 1 else by_row
    tiles = TILES_FP4 if output.b == E2M1 else tiles
    decodes = output.b in DECODED and output in OUTPUTS_OF[output.operands]
    if output.operands in (USUAL_OPERANDS, OPERANDS_BY_ROW) and decodes:
        return tiles
    return tuple(
        tile for tile in tiles if (decodes if tile.is_decode else tile.config(output, BLOCK_K).why_illegal() is None)
    )


def _tiles_for_rows(output: Output) -> tuple[Tile, ...]:
    has_addresses, by_counts = output.epilogue.has_row_addresses, output.work.has_planes
    if output.sfb == PER_ROW and output.parts == 1:
        return ROWS_PER_ROW
    if output.b == E2M1 and has_addresses:
        return ROWS_FP4
    if output.has_chunks:
        return ROWS_CHUNKS if by_counts or output.scale_parts == 1 else ROWS_FINE
    if output.parts > 1 and (output.sfa, output.sfb) != (PER_64, PER_BLOCK):
        return ROWS_FINE
    if output.b == E2M1:
        return (*ROWS_FP4, FEW_FP4) if output.is_fp32 or output.with_c else (*ROWS_FP4, Tile(256, 128), FEW_FP4)
    if output.work.is_twice:
        return ROWS_APART[1:]
    if output.epilogue.activates:
        return ROWS_APART if output.epilogue.gates_apart else ROWS_SILU
    usual = ROWS_COUNTS if by_counts else ROWS
    return usual if output.parts > 1 or has_addresses else (*usual, *FEW)


def wants_pairs(output: Output) -> bool:
    """Tell whether a single CTA has too few registers for the largest tile of groups along k."""
    return output.with_c or not output.is_fp32


def pairs_up(n: int) -> bool:
    """Tell whether each of the largest tiles along n has a neighbour with which it can share A."""
    return ceil_div(n, LARGEST.block_n) % 2 == 0


def skipping(config: GemmConfig | DecodeConfig, panel_columns: int) -> GemmConfig | DecodeConfig:
    """Make a plain product's configuration store to the parts of heads, in panels of at most `panel_columns`.

    The configuration must not split k, unless it is the decode kernel's, which stores without panels.
    """
    if isinstance(config, DecodeConfig):
        return replace(config, epilogue=TO_HEADS)
    narrower = max(config.panel_columns // panel_columns, 1)
    return replace(
        config,
        epilogue=TO_HEADS,
        panel_columns=config.panel_columns // narrower,
        panels_per_store=config.panels_per_store * narrower,
    )


@cache
def _config(tile: Tile, output: Output, blocks_left: int) -> GemmConfig | DecodeConfig:
    if tile.is_decode:
        config = decode_config(
            tile.block_m,
            tile.block_n // 64,
            tile.cluster_k,
            tile.ctas_per_sm,
            is_fp32=output.is_fp32,
            with_c=output.with_c or output.adds_to_d,
            c_is_fp32=output.c_is_fp32,
            work=output.work,
            b=output.b,
            sfb=output.sfb or PER_BLOCK,
            sfa=output.sfa or PER_ROW,
        )
        if config is None:
            raise ValueError(f"tile: {tile} cannot be built")
        return config
    k = BLOCK_K * (BLOCKS_OF_RUNS + blocks_left)  # leaves the same tail as the problem's k
    return tile_config(tile.block_m, tile.block_n, output, tile.cluster_m, tile.cluster_n, tile.cluster_k, k)
