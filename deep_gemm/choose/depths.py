"""Which tile multiplies groups along k. All groups have the same tiles, and the host need not know their depths.

Tiles are handed out so that CTAs get about equal depths (see cuda/k_scheduler.cuh). So it counts how many waves of
tiles of the average depth there are. A tile takes as long as it computes, or as long as its part of D takes to be read
and written where the depth is small: large tiles leave less room in shared memory to do both at a time.

The times were fitted to 12 products on an H200, with depths from 128 to 4096; in each this chooses the fastest tile.

The largest tiles are taken by pairs of CTAs that share A, where columns of tiles come in pairs. That takes up to 1%
more cycles; but such products are limited by power, the L2 hands out a third less, and the clock rises by 2%. On an
H200 16 groups of 7168x2048 or 4096x7168 took 1.5 to 2% less time at a depth of 2048, and 4 of 7168x2048 0.5 to 0.8% at
8192. Sharing B gained nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ..gpus import H200, Gpu
from ..problem.layout import ceil_div
from .config import BLOCK_K, GemmConfig, Groups, Output, tile_config
from .cost import Fit
from .tiles import Tile

LEAST_US = {
    Tile(64, 64, 190, 0.35): 1.1,
    Tile(128, 96, 380, 1.0): 4.7,
    Tile(128, 128, 480, 1.2): 6.3,
    Tile(256, 128, 895, 1.7): 14.0,
}
"""What a tile takes on an H200 that is added to D, however small the depth; half of it where D is only written."""
TILES = tuple(LEAST_US)
LARGEST = TILES[-1]
SHARING_A = replace(LARGEST, cluster_n=2)
"""The largest, as pairs of CTAs take it."""
TILES_TO_C = (*TILES[:-1], SHARING_A)
"""Where C is apart from D, pairs take the largest even if one column is left over, which then counts as two: with NVRTC
13.1 and later, the loading warp of a CTA alone spills a register there."""


@cache
def select_k_grouped(num_groups: int, m: int, n: int, k: int, output: Output, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest cost for groups of depth `k` on average."""
    has_pairs = ceil_div(n, LARGEST.block_n) % 2 == 0
    tiles = TILES_TO_C if output.with_c and not has_pairs else TILES
    best = min(tiles, key=lambda tile: cost_us(tile, num_groups, m, n, k, output, gpu))
    return k_grouped_config(SHARING_A if best == LARGEST and has_pairs else best, output)


def cost_us(tile: Tile, num_groups: int, m: int, n: int, k: int, output: Output, gpu: Gpu) -> float:
    """About how long the product takes."""
    fit = Fit.of(tile, n, k, output, gpu)
    tiles = num_groups * ceil_div(m, tile.block_m) * fit.clusters_n
    least_us = LEAST_US[replace(tile, cluster_n=1)] * (1.0 if output.with_c or output.adds_to_d else 0.5)
    least_us *= (gpu.num_sms / H200.num_sms) / (gpu.dram_tb_per_s / H200.dram_tb_per_s)
    return ceil_div(tiles, fit.clusters_at_once) * max(fit.wave_us, least_us)


def k_grouped_config(tile: Tile, output: Output) -> GemmConfig:
    """The kernel's configuration for a tile: any group may leave a tail of k-blocks, whatever the others do."""
    return tile_config(tile.block_m, tile.block_n, output, cluster_n=tile.cluster_n, k=BLOCK_K)


def reachable_k_grouped() -> list[GemmConfig]:
    """Every configuration that `select_k_grouped` can give."""
    outputs = [
        Output(True, with_c, adds_to_d, sfb_is_per_row=True, groups=Groups.DEPTHS)
        for with_c, adds_to_d in ((False, False), (True, False), (False, True))
    ]
    return [
        k_grouped_config(tile, output)
        for output in outputs
        for tile in (TILES_TO_C if output.with_c else (*TILES, SHARING_A))
    ]
