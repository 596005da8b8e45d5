"""Choose the configuration that runs products of heads, all of which count as one product's tiles and bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ...core.gpu import Gpu
from .. import tiles
from ..config import BLOCK_K, GemmConfig
from ..config_decode import DecodeConfig
from ..cost import Estimate, memory_us, on_weight, row_bytes
from ..output import OPERANDS_BY_ROW, USUAL_OPERANDS, Groups, Operands, Output
from ..tiles import BLOCKS_OF_RUNS, Tile
from ..timings import Timings, timings_of

TILES = (
    Tile(64, 64),
    Tile(64, 128),
    Tile(128, 64),
    Tile(128, 128),
    Tile(128, 192),
    Tile(128, 256, cluster_n=2),
    Tile(128, 256, cluster_m=2),
    Tile(128, 256),
    Tile(256, 128),
    *(
        Tile(tokens, columns, cluster_k=ctas, is_decode=True)
        for tokens, columns, ctas in (
            (8, 64, 1),
            (8, 64, 2),
            (8, 64, 4),
            (8, 128, 1),
            (16, 64, 1),
            (16, 64, 2),
            (16, 64, 4),
            (16, 128, 1),
            (32, 64, 1),
            (32, 64, 2),
            (32, 64, 4),
            (32, 128, 1),
            (64, 64, 1),
            (64, 64, 2),
        )
    ),
)
"""Heads make many tiles, so that few need a split of k, and none in more than four parts.

Of tiles with the same cost the first is taken: on an H200 8 heads of 4096 x 1024 x 4096 take 1.2% less in pairs that
share A, and 0.9% less in pairs that share B.
"""
TILES_PER_ROW = (Tile(64, 64), Tile(128, 128), Tile(192, 128), Tile(256, 128))
TILES_OF: dict[Operands, tuple[Tile, ...]] = {USUAL_OPERANDS: TILES, OPERANDS_BY_ROW: TILES_PER_ROW}
OUTPUTS = tuple(
    replace(output, groups=Groups.HEADS) for output in tiles.OUTPUTS_BY_NAME.values() if output.operands in TILES_OF
)


@lru_cache(maxsize=4096)
def select_heads(
    heads: int, m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> GemmConfig | DecodeConfig:
    """The configuration of the lowest cost. `split_k`, `whole_gpu`: as `choose.dense.select` has them."""
    return chosen_tile(heads, m, n, k, output, gpu, split_k=split_k, whole_gpu=whole_gpu).config(output, k)


def chosen_tile(
    heads: int, m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> Tile:
    """The tile of `select_heads`."""
    timings = timings_of(gpu)
    offered = (
        tile
        for tile in tiles_for(output)
        if (split_k or tile.cluster_k == 1) and (whole_gpu or not tile.is_decode) and tile.cluster_size <= gpu.num_sms
    )
    return min(offered, key=lambda tile: estimate(tile, heads, m, n, k, output, gpu, timings).cost_us)


def estimate(tile: Tile, heads: int, m: int, n: int, k: int, output: Output, gpu: Gpu, timings: Timings) -> Estimate:
    """Estimate how long the products take: as a dense product with the tiles of all heads."""
    offer = on_weight(tile, n, k, output, gpu, timings)
    moved = memory_us(heads * (n * k + m * row_bytes(n, k, output)) / 1e6, timings)
    return offer._replace(clusters_n=offer.clusters_n * heads).estimate(m, moved, timings.launch_us)


def tiles_for(output: Output) -> tuple[Tile, ...]:
    """The tiles that there are for a kind of product."""
    return TILES_OF[output.operands]


def reachable() -> list[GemmConfig | DecodeConfig]:
    """Every configuration that `select_heads` can give."""
    found = [
        tile.config(output, BLOCK_K * (BLOCKS_OF_RUNS + blocks_left))
        for blocks_left in range(BLOCKS_OF_RUNS)
        for output in OUTPUTS
        for tile in tiles_for(output)
    ]
    return list(dict.fromkeys(found))
