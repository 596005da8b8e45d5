"""Which tile multiplies grouped rows. The host knows how many rows there are in all, or about how many each group has.

The cost is what computing takes by cost.py, with an expected number of tiles. What memory takes is about the same
with any tile, and left out. Group sizes are taken to be spread

    where rows are stacked, like an exponential distribution, as the tokens of experts are: a group of x rows on average
    then has 1 / (1 - exp(-block_m / x)) tiles along m on average, one if it is small, half a tile too many if large
    where `expected_m` is given, evenly from 0.7 to 1.3 of it

On an H200, over 46 cases of 1 to 256 groups, the tile that this chose took 0.7% longer than the best of five, on
average, and at most 9%.
"""

from __future__ import annotations

import math
from functools import cache

from .config import BLOCK_K, WGMMA_ROWS, WIDE_TILE, GemmConfig, Groups, Output, tile_config
from .cost import Fit, Gpu
from .tiles import TILES as DENSE_TILES
from .tiles import Tile, of_sizes

TILES = (
    Tile(64, 128, 224, 0.67),
    *of_sizes(DENSE_TILES, (128, 128), (128, 160)),
    Tile(128, 192, 564, 0.86),
    *of_sizes(DENSE_TILES, (128, 256)),
)
"""Two take longer than in a dense product."""
TILES_1D1D = (
    Tile(64, 64, 190, 0.51),
    Tile(64, 128, 290, 0.67),
    Tile(128, 96, 380, 0.71),
)
"""Rows of B with scales of their own leave too few registers for 128 x 128."""

SPREAD = tuple(0.7 + 0.6 * (i + 0.5) / 12 for i in range(12))
"""Rows of a group, as parts of `expected_m`."""
LONE_WARPGROUP = 0.55
"""What a wide tile takes of a whole one where one of its two warpgroups has no rows, and none are loaded for it."""


@cache
def select_grouped(num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest cost for groups of `rows` rows on average."""
    tiles = TILES_1D1D if output.sfb_is_per_row else TILES
    best = min(tiles, key=lambda tile: cost_us(tile, num_groups, rows, n, k, output, gpu))
    return tile_config(best.block_m, best.block_n, output, k=k)


def cost_us(tile: Tile, num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu) -> float:
    """About how long the product takes."""
    fit = Fit.of(tile, n, k, output, gpu)
    busy = num_groups * min(rows, 1.0)  # groups that have rows
    if output.groups == Groups.COUNTS:
        tiles_m = [float(math.ceil(part * max(rows, 1.0) / tile.block_m)) for part in SPREAD]
    else:
        tiles_m = [1 / -math.expm1(-tile.block_m / max(rows, 1.0))]
    mean = sum(tiles_m) / len(tiles_m)
    if output.groups != Groups.COUNTS:
        waves = max(busy * mean * fit.clusters_n / fit.clusters_at_once + 0.5, 1.0)
    else:  # what one group has may be far from what is expected; what several have in all is close to it
        totals = tiles_m if num_groups == 1 else [busy * mean]
        waves = sum(math.ceil(x * fit.clusters_n / fit.clusters_at_once) for x in totals) / len(totals)
    if tile.block_n >= WIDE_TILE:
        waves *= 1 - _share_of_small_groups(rows, output.groups) * (1 - LONE_WARPGROUP)
    return fit.launch_us + waves * fit.wave_us


def _share_of_small_groups(rows: float, groups: Groups) -> float:
    """How many groups have no more rows than one warpgroup multiplies at a time."""
    if groups == Groups.COUNTS:
        return sum(part * rows <= WGMMA_ROWS for part in SPREAD) / len(SPREAD)
    return -math.expm1(-WGMMA_ROWS / max(rows, 1.0))


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
        for tile in (TILES_1D1D if per_row else TILES)
    ]
    return list(dict.fromkeys(found))
