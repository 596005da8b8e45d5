"""Which configuration runs a product: candidates -> legal? -> cost -> best. Deterministic, explainable.

A table of measured choices (tuned.py) is asked first; else the cost of cost.py decides, among the few tiles that serve
a weight.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache

from ..gpus import GPUS, Gpu, gpu_named
from .config import BLOCK_K, GemmConfig, Output
from .config_decode import DecodeConfig
from .cost import Fit
from .table import Entry, Product, read_table, tables_in_force
from .tiles import BLOCKS_OF_RUNS, OUTPUTS, OUTPUTS_1D1D, TILES, Tile, tiles_by_name, tiles_for

LAST_RESORT = 100.0
"""How much a size of batch loses, as a multiple of its best cost, while no chosen tile can run it."""
MAX_MENU = 12
LOSS_TO_AVOID = 0.05
"""What is lost beyond this part of the best cost counts three times when the few tiles of a weight are picked."""
MENU_SWEEP = (
    1, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 320, 384, 448,
    512, 576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280, 1408, 1536,
    1664, 1792, 1920, 2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840, 4096, 5120, 6144, 8192,
)  # fmt: skip


def select(
    m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> GemmConfig | DecodeConfig:
    """The configuration that a table has for this product, else that of the lowest cost.

    Without `split_k` none in which several CTAs add up their parts of k: then each element of D is promoted in order of
    k by one thread, and its bits depend on its row of A and its row of B alone. Without `whole_gpu` none whose grid
    cannot be held to some of the SMs.
    """
    return chosen_tile(m, n, k, output, gpu, split_k=split_k, whole_gpu=whole_gpu).config(output, k)


def chosen_tile(
    m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> Tile:
    """The tile of `select`."""
    tile = tuned_tile(m, n, k, output, gpu)
    if tile is None or (tile.cluster_k > 1 and not split_k) or (tile.is_decode and not whole_gpu):
        return cheapest_tile(m, n, k, output, gpu, split_k=split_k, whole_gpu=whole_gpu)
    return tile


def cheapest_tile(
    m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> Tile:
    """The tile with the lowest cost, of the few that serve this weight."""
    fits = menu(n, k, output, gpu, split_k=split_k)
    if not whole_gpu:
        fits = tuple(fit for fit in fits if not fit.tile.is_decode)
    return min(fits, key=lambda fit: fit.cost_us(m)).tile


def tuned_tile(m: int, n: int, k: int, output: Output, gpu: Gpu) -> Tile | None:
    """The tile that a table in force has for this very product on this GPU."""
    tiles = tuned_tiles()
    return tiles.get((m, n, k, output, gpu.name, gpu.num_sms)) if tiles else None


@cache
def tuned_tiles() -> dict[Product, Tile]:
    """All that the tables in force have.

    An entry whose tile is chosen no more, or not for this product, is told of and left out: it was right with the
    version that wrote it, and a table that grew old must not stop a program.
    """
    found = {}
    for path in tables_in_force():
        for entry in read_table(path):
            tile, reason = _tile_of(entry)
            if tile is None:
                print(f"deep_gemm: {path}: {entry.name}: left out, {reason}", file=sys.stderr)
            else:
                found[entry.product] = tile
    return found


def _tile_of(entry: Entry) -> tuple[Tile | None, str | None]:
    """An entry's tile; or None, and why it has none."""
    gpu, tile = gpu_named(entry.gpu), tiles_by_name(entry.output).get(entry.tile)
    if gpu is None:
        return None, f"gpu: expected one of {', '.join(gpu.name for gpu in GPUS)}, got {entry.gpu!r}"
    if tile is None:
        return None, f"tile: expected one of {', '.join(tiles_by_name(entry.output))}, got {entry.tile!r}"
    reason = Fit.of(tile, entry.n, entry.k, entry.output, replace(gpu, num_sms=entry.num_sms)).why_not(entry.m)
    if reason is not None:
        return None, f"tile: expected one that can run it, got {entry.tile}: {reason}"
    return tile, None


@cache
def menu(n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True) -> tuple[Fit, ...]:
    """The few tiles that serve one weight for every m, so that few kernels are compiled and kept.

    It takes the tile that saves most over a sweep of m, one at a time, and then looks at each choice once more. What is
    saved counts relative to the best cost at that m, so that every size of batch has the same say; powers of two, which
    programs choose where they have a choice, have two. Over 67 weights and 74 sizes of batch the best of twelve is 0.2%
    from the best of all by this cost, at the 99th percentile 5%.
    """
    fits = [Fit.of(tile, n, k, output, gpu) for tile in tiles_for(output) if split_k or tile.cluster_k == 1]
    costs = [[fit.cost_us(m) for fit in fits] for m in MENU_SWEEP]
    losses = [[_loss(cost / min(row) - 1) for cost in row] for row in costs]
    weights = [2 if m.bit_count() == 1 else 1 for m in MENU_SWEEP]

    def best_addition(chosen: list[int]) -> int:
        so_far = [min([LAST_RESORT, *(row[index] for index in chosen)]) for row in losses]
        return min(
            range(len(fits)),
            key=lambda index: sum(
                weight * min(low, row[index]) for weight, low, row in zip(weights, so_far, losses, strict=True)
            ),
        )

    chosen: list[int] = []
    while len(chosen) < MAX_MENU:
        chosen.append(best_addition(chosen))
    for place in range(MAX_MENU):  # the first were taken before it was known what the others would serve
        chosen[place] = best_addition(chosen[:place] + chosen[place + 1 :])
    return tuple(fits[index] for index in sorted(set(chosen)))


def _loss(part: float) -> float:
    return part + 2 * max(part - LOSS_TO_AVOID, 0.0)


def reachable() -> list[GemmConfig]:
    """Every configuration of `fp8_gemm` that `select` can give: all compile without spills, which the tests see to."""
    found = [
        tile.config(output, BLOCK_K * (BLOCKS_OF_RUNS + blocks_left))
        for blocks_left in range(BLOCKS_OF_RUNS)
        for output in (*OUTPUTS, *OUTPUTS_1D1D)
        for tile in tiles_for(output)
    ]
    return list(dict.fromkeys(config for config in found if isinstance(config, GemmConfig)))


def reachable_decode() -> list[DecodeConfig]:
    """Every configuration of the decode kernel that `select` can give."""
    found = [tile.config(output, BLOCK_K) for output in OUTPUTS for tile in TILES]
    return list(dict.fromkeys(config for config in found if isinstance(config, DecodeConfig)))
