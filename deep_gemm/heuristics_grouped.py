"""Which tile multiplies grouped rows. The host knows how many rows there are in all, not how they fall to the groups.

Group sizes are taken to be spread like an exponential distribution, as the tokens of experts are: a group of x rows on
average then has 1 / (1 - exp(-block_m / x)) tiles along m on average, one if it is small and half a tile more than x
rows need if it is large. The rest of the cost is that of heuristics.py.
"""

from __future__ import annotations

import math
from functools import cache

from .config import GemmConfig, Output, tile_config
from .heuristics import SHARPNESS, Fit, Gpu, Tile

TILES = (
    Tile(64, 64, 136, 0.51),
    Tile(64, 128, 209, 0.67),
    Tile(128, 128, 393, 0.71),
    Tile(128, 192, 548, 0.86),
    Tile(128, 256, 756, 0.74),
)
TILES_1D1D = (
    Tile(64, 64, 190, 0.51),
    Tile(64, 128, 290, 0.67),
    Tile(128, 96, 380, 0.71),
)
"""Rows of B with scales of their own leave too few registers for 128 x 128."""


@cache
def select_grouped(num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest cost for groups of `rows` rows on average."""
    tiles = TILES_1D1D if output.sfb_is_per_row else TILES
    best = min(tiles, key=lambda tile: cost_us(tile, num_groups, rows, n, k, output, gpu))
    return tile_config(best.block_m, best.block_n, output, k=k)


def cost_us(tile: Tile, num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu) -> float:
    """About how long the product takes."""
    fit = Fit.of(tile, n, k, output, gpu)
    rows = max(rows, 1 / num_groups)
    busy = num_groups * min(rows, 1.0)  # groups that have rows
    tiles = busy / -math.expm1(-tile.block_m / max(rows, 1.0)) * fit.clusters_n
    compute = fit.launch_us + math.ceil(tiles / fit.clusters_at_once) * fit.wave_us
    memory = fit.launch_us + busy * fit.weight_us + num_groups * rows * fit.row_us
    return float((compute**SHARPNESS + memory**SHARPNESS) ** (1 / SHARPNESS))


def reachable_grouped() -> list[GemmConfig]:
    """Every configuration that `select_grouped` can give."""
    from .config import BLOCK_K, Groups

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
