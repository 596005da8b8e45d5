"""Which tile multiplies grouped rows. The host knows how many rows there are in all, or about how many each group has.

The cost is what computing takes by cost.py, with an expected number of tiles. What memory takes is about the same
with any tile, and left out. Group sizes are taken to be spread

    where rows are stacked, like an exponential distribution, as the tokens of experts are: a group of x rows on average
    then has 1 / (1 - exp(-block_m / x)) tiles along m on average, one if it is small, half a tile too many if large
    where `expected_m` is given, evenly from 0.7 to 1.3 of it

On an H200, over 46 cases of 1 to 256 groups, the tile that this chose took 0.8% longer than the best, on average, and
at most 6%, before last tiles were cut in halves.
"""

from __future__ import annotations

import math
from functools import cache

from ..gpus import Gpu
from .config import BLOCK_K, WGMMA_ROWS, GemmConfig, Groups, Output, tile_config
from .cost import Fit
from .tiles import TILES as DENSE_TILES
from .tiles import Tile, of_sizes

TILES = (
    Tile(64, 128, 224, 0.67),
    *of_sizes(DENSE_TILES, (128, 128), (128, 160)),
    Tile(128, 192, 564, 0.86),
    *of_sizes(DENSE_TILES, (128, 256)),
)
"""Two take longer than in a dense product."""
TILES_COUNTS = (*TILES, Tile(256, 128, 761, 0.8))
"""For rows that are not stacked, whose scales one TMA box of 256 rows brings."""
TILES_1D1D = (
    Tile(64, 64, 190, 0.51),
    Tile(64, 128, 290, 0.67),
    Tile(128, 96, 380, 0.71),
)
"""Rows of B with scales of their own leave too few registers for 128 x 128."""

SPREAD = tuple(0.7 + 0.6 * (i + 0.5) / 12 for i in range(12))
"""Rows of a group, as parts of `expected_m`."""
SHARES = {64: (1.0,), 128: (0.65, 1.0), 256: (0.4, 0.6, 0.87, 1.0)}
"""What a tile of so many rows takes of a whole one where only 1, 2, 3 times 64 of them, or fewer of the last, exist."""
HALVES = 0.65
"""What a last wave takes of a whole one where its tiles are cut in halves, for which they must be few."""


@cache
def select_grouped(num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest cost for groups of `rows` rows on average."""
    best = min(tiles_for(output), key=lambda tile: cost_us(tile, num_groups, rows, n, k, output, gpu))
    return tile_config(best.block_m, best.block_n, output, k=k)


def cost_us(tile: Tile, num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu) -> float:
    """About how long the product takes."""
    fit = Fit.of(tile, n, k, output, gpu)
    cuts = _cuts_last_tiles(tile, output)
    busy = num_groups * min(rows, 1.0)  # groups that have rows
    if output.groups == Groups.COUNTS:
        # One group's rows may be far from `rows`, those of several are close to it in all.
        parts = [_tiles_of_group(tile.block_m, part * max(rows, 1.0)) for part in SPREAD]
        tiles, work = (sum(of_parts) / len(parts) for of_parts in zip(*parts, strict=True))
        totals = [of_part for of_part, _ in parts] if num_groups == 1 else [busy * tiles]
        waves = sum(_waves(x * fit.clusters_n / fit.clusters_at_once, cuts) for x in totals) / len(totals)
    else:
        tiles = 1 / -math.expm1(-tile.block_m / max(rows, 1.0))
        work = tiles * (1 + math.expm1(-WGMMA_ROWS / max(rows, 1.0)) * (1 - SHARES[tile.block_m][0]))
        lost = 0.5 - (1 - HALVES) / 2 if cuts else 0.5  # by the last wave, on average
        waves = max(busy * tiles * fit.clusters_n / fit.clusters_at_once + lost, 1.0)
    return float(fit.launch_us + waves * work / tiles * fit.wave_us)


@cache
def _cuts_last_tiles(tile: Tile, output: Output) -> bool:
    return tile_config(tile.block_m, tile.block_n, output).cuts_last_tiles


def _waves(full: float, cuts: bool) -> float:
    """How long CTAs are busy, in whole tiles, with tiles for so many full waves."""
    return math.floor(full) + HALVES if cuts and 0 < full % 1 <= 0.5 else math.ceil(full)


def _tiles_of_group(block_m: int, rows: float) -> tuple[int, float]:
    """How many tiles along m a group has, and what they take, in whole tiles.

    Only tiles of 256 rows end low; lower ones are moved up, where there are several, so as to be whole.
    """
    tiles = math.ceil(rows / block_m)
    last = rows - (tiles - 1) * block_m if tiles == 1 or len(SHARES[block_m]) > 2 else block_m
    return tiles, tiles - 1 + SHARES[block_m][math.ceil(last / WGMMA_ROWS) - 1]


def tiles_for(output: Output) -> tuple[Tile, ...]:
    """The tiles that there are for a kind of product."""
    if output.sfb_is_per_row:
        return TILES_1D1D
    return TILES_COUNTS if output.groups == Groups.COUNTS else TILES


def reachable_grouped() -> list[GemmConfig]:
    """Every configuration that `select_grouped` can give."""
    found = [
        tile_config(
            tile.block_m, tile.block_n, Output(is_fp32, sfb_is_per_row=per_row, groups=groups), k=BLOCK_K * blocks
        )
        for groups in (Groups.IDS, Groups.ENDS, Groups.COUNTS)
        for is_fp32 in (False, True)
        for per_row in (False, True)
        for blocks in (4, 5)
        for tile in tiles_for(Output(sfb_is_per_row=per_row, groups=groups))
    ]
    return list(dict.fromkeys(found))
