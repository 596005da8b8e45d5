"""Which tile multiplies groups along k. All groups have the same tiles, and the host need not know their depths.

Tiles are handed out so that CTAs get about equal depths (see cuda/k_scheduler.cuh). So it counts how many waves of
tiles of the average depth there are; memory takes the same time whichever tile it is.
"""

from __future__ import annotations

from functools import cache

from . import heuristics_grouped
from .config import BLOCK_K, GemmConfig, Groups, Output, tile_config
from .cost import Fit, Gpu
from .layout import ceil_div
from .tiles import TILES_1D1D, Tile, of_sizes

TILES = of_sizes((*TILES_1D1D, *heuristics_grouped.TILES_1D1D), (64, 64), (128, 96), (128, 128), (256, 128))


@cache
def select_k_grouped(num_groups: int, m: int, n: int, k: int, output: Output, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest cost for groups of depth `k` on average."""
    best = min(TILES, key=lambda tile: cost_us(tile, num_groups, m, n, k, output, gpu))
    return k_grouped_config(best, output)


def cost_us(tile: Tile, num_groups: int, m: int, n: int, k: int, output: Output, gpu: Gpu) -> float:
    """About how long computing takes."""
    fit = Fit.of(tile, n, k, output, gpu)
    tiles = num_groups * ceil_div(m, tile.block_m) * fit.clusters_n
    return ceil_div(tiles, fit.clusters_at_once) * fit.wave_us


def k_grouped_config(tile: Tile, output: Output) -> GemmConfig:
    """The kernel's configuration for a tile: any group may leave a rest of k-blocks, whatever the others do."""
    return tile_config(tile.block_m, tile.block_n, output, k=BLOCK_K)


def reachable_k_grouped() -> list[GemmConfig]:
    """Every configuration that `select_k_grouped` can give."""
    return [
        k_grouped_config(tile, Output(True, with_c, adds_to_d, sfb_is_per_row=True, groups=Groups.DEPTHS))
        for with_c, adds_to_d in ((False, False), (True, False), (False, True))
        for tile in TILES
    ]
