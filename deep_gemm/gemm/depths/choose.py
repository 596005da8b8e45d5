"""Choose the tile that multiplies groups along k.

All groups have the same tiles, and the host need not know their depths. Tiles are handed out so that CTAs get about
equal depths (see gemm/work/k_scheduler.cuh), so the cost counts rounds of tiles of the average depth.

The largest tiles are taken by pairs of CTAs that share A, if columns of tiles come in pairs: that takes up to 1% more
cycles, but less power, by which such products are limited.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...core.check.layout import ceil_div
from ...core.check.recipes import PER_ROW
from ...core.gpu import Gpu
from ..config import BLOCK_K, GemmConfig
from ..config_of_tile import tile_config
from ..cost import NEVER, Estimate, by_size, memory_us, on_weight, row_bytes, together
from ..output import BF16, FP32, FP32_C, FP32_D, Groups, Output
from ..tiles import Tile
from ..timings import Timings, timings_of

TILES = (Tile(64, 64), Tile(128, 96), Tile(128, 128), Tile(256, 128))
LARGEST = TILES[-1]
SHARING_A = replace(LARGEST, cluster_n=2)
"""The largest, as pairs of CTAs take it."""
TILES_TO_C = (*TILES[:-1], SHARING_A)
"""If C is apart from D, or D is BF16, pairs take the largest even if one column is left over, which then counts as
two: with NVRTC 13.1 and later, the loading warp of a CTA alone spills a register there."""


@lru_cache(maxsize=1024)
def select_k_grouped(num_groups: int, m: int, n: int, k: int, output: Output, gpu: Gpu) -> GemmConfig:
    """The configuration with the lowest cost for groups of depth `k` on average."""
    return k_grouped_config(chosen_tile(num_groups, m, n, k, output, gpu, timings_of(gpu)), output)


def chosen_tile(num_groups: int, m: int, n: int, k: int, output: Output, gpu: Gpu, timings: Timings) -> Tile:
    """The tile of `select_k_grouped`, by these timings."""
    tiles = TILES_TO_C if _wants_pairs(output) and not _pairs_up(n) else TILES
    best = min(tiles, key=lambda tile: estimate(tile, num_groups, m, n, k, output, gpu, timings).cost_us)
    return SHARING_A if best == LARGEST and _pairs_up(n) else best


def _wants_pairs(output: Output) -> bool:
    """Tell whether a CTA alone has too few registers for the largest tile."""
    return output.with_c or not output.is_fp32


def _pairs_up(n: int) -> bool:
    """Tell whether each of the largest tiles has a neighbour to share A with."""
    return ceil_div(n, LARGEST.block_n) % 2 == 0


def estimate(
    tile: Tile, num_groups: int, m: int, n: int, k: int, output: Output, gpu: Gpu, timings: Timings
) -> Estimate:
    """Estimate how long the product takes: a tile as long as it is multiplied, or as the one before is added to D."""
    offer = on_weight(tile, n, k, output, gpu, timings)
    tiles = num_groups * ceil_div(m, offer.rows) * offer.clusters_n
    rounds = offer.rounds(tiles)
    add_us = timings.add_us * by_size(tile) if output.with_c or output.adds_to_d else 0.0
    multiply_us = rounds * max(offer.round_us, add_us)
    moving_us = memory_us(num_groups * (n * k + m * row_bytes(n, k, output)) / 1e6, timings)
    why_not = "odd tiles along n" if tile == SHARING_A and not (_pairs_up(n) or _wants_pairs(output)) else None
    cost_us = NEVER if why_not else timings.launch_us + together(multiply_us, moving_us)
    return Estimate(tile, tiles, rounds, multiply_us, moving_us, cost_us, why_not)


def k_grouped_config(tile: Tile, output: Output) -> GemmConfig:
    """The kernel's configuration for a tile: any group may leave a tail of k-blocks, whatever the others do."""
    return tile_config(tile.block_m, tile.block_n, output, cluster_n=tile.cluster_n, k=BLOCK_K)


def reachable_k_grouped() -> list[GemmConfig]:
    """Every configuration that `select_k_grouped` can give."""
    outputs = [replace(output, sfb=PER_ROW, groups=Groups.DEPTHS) for output in (FP32, FP32_C, FP32_D, BF16)]
    return [
        k_grouped_config(tile, output)
        for output in outputs
        for tile in (TILES_TO_C if _wants_pairs(output) else (*TILES, SHARING_A))
    ]
