"""Choose the configuration of a dense product: a table of measured choices is asked first, then the cost of cost.py.

A weight is served by few kernels, whatever m is, so that few are compiled and kept. They are picked when the weight is
first met, together with the rows that each is for; a call then only looks up its m.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from math import log
from typing import NamedTuple

from ...core.check.recipes import E2M1
from ...core.gpu import GPUS, Gpu, gpu_named
from ...core.settings import settings
from ..config import BLOCK_K, GemmConfig
from ..config_decode import DecodeConfig
from ..cost import OnWeight, dense_memory_us, on_weight, together
from ..output import USUAL_OPERANDS, Operands, Output
from ..table import Entry, Product, read_table
from ..tiles import BLOCKS_OF_RUNS, OUTPUTS_BY_NAME, OUTPUTS_OF, TILES_OF, Tile, tiles_by_name, tiles_for
from ..timings import Timings, timings_of

MAX_MENU = 12
BANDS = (*range(8, 129, 8), *range(192, 8193, 64))
"""The largest m of each band. Within a band no tile needs more rounds for one m than for another."""
BAND_WEIGHTS = tuple(log(end / begin) for begin, end in pairwise((4, *BANDS)))
"""Weight of a band when tiles are picked: each doubling of m has the same say."""


def select(
    m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True, whole_gpu: bool = True
) -> GemmConfig | DecodeConfig:
    """The configuration that a table has for this product, else that of the lowest cost.

    Without `split_k` none in which several CTAs add up their parts of k: then each element of D is promoted in order of
    k by one thread, and its bits depend on its row of A and its row of B alone. Without `whole_gpu` none whose grid
    cannot be held to some of the SMs.
    """
    if tuned_tiles():
        tile = tuned_tile(m, n, k, output, gpu)
        if tile is not None and not ((tile.cluster_k > 1 and not split_k) or (tile.is_decode and not whole_gpu)):
            return tile.config(output, k)
    menu = menu_of(n, k, output, gpu, split_k, whole_gpu)
    number = menu.numbers[band_of(m)]
    config = menu.configs[number]
    if config is None:
        config = menu.configs[number] = menu.offers[number].tile.config(output, k)
    return config


def chosen_tile(m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True) -> Tile:
    """The tile of `select`."""
    tile = tuned_tile(m, n, k, output, gpu)
    if tile is None or (tile.cluster_k > 1 and not split_k):
        return cheapest_tile(m, n, k, output, gpu, split_k=split_k)
    return tile


def cheapest_tile(m: int, n: int, k: int, output: Output, gpu: Gpu, *, split_k: bool = True) -> Tile:
    """The tile that would be chosen if no table had one."""
    return menu_of(n, k, output, gpu, split_k, True).tile_for(m)


class Menu(NamedTuple):
    """The few tiles that serve one weight, and which of them serves which rows."""

    offers: tuple[OnWeight, ...]
    numbers: tuple[int, ...]
    """The place of each band's tile among them."""
    configs: list[GemmConfig | DecodeConfig | None]
    """Configurations of the tiles, made when they are first asked for."""

    def tile_for(self, m: int) -> Tile:
        """The tile that serves so many rows."""
        return self.offers[self.numbers[band_of(m)]].tile


@lru_cache(maxsize=4096)
def menu_of(n: int, k: int, output: Output, gpu: Gpu, split_k: bool = True, whole_gpu: bool = True) -> Menu:
    """The menu of a weight.

    If a kernel must keep to some of the SMs, rows that the decode kernel would serve go to others on the menu.
    """
    if whole_gpu:
        return menu_by(timings_of(gpu), n, k, output, gpu, split_k)
    all_offers = menu_of(n, k, output, gpu, split_k).offers
    offers = tuple(offer for offer in all_offers if not offer.tile.is_decode)
    columns = zip(*(offer.multiply_us(BANDS) for offer in offers), strict=True)
    return Menu(offers, tuple(column.index(min(column)) for column in columns), [None] * len(offers))


def menu_by(timings: Timings, n: int, k: int, output: Output, gpu: Gpu, split_k: bool = True) -> Menu:
    """Pick the tiles for a weight, by given timings.

    Those that are best for some band, and then one fewer at a time, until they are few: the one to go is that which is
    missed least. What a band loses counts as a part of the least cost that it could have.
    """
    tiles = [tile for tile in tiles_for(output) if split_k or tile.cluster_k == 1]
    if (output.b == E2M1 or output.folds_parts) and not split_k:  # the two kernels add up in different orders
        tiles = [tile for tile in tiles if not tile.is_decode]
    offers = [on_weight(tile, n, k, output, gpu, timings) for tile in tiles]
    columns = list(zip(*(offer.multiply_us(BANDS) for offer in offers), strict=True))
    best = [column.index(min(column)) for column in columns]
    kept = sorted(set(best))
    if len(kept) > MAX_MENU:
        _drop_the_least_missed(kept, best, columns, [dense_memory_us(m, n, k, output, timings) for m in BANDS])
    return Menu(tuple(offers[i] for i in kept), tuple(kept.index(i) for i in best), [None] * len(kept))


def _drop_the_least_missed(
    kept: list[int], best: list[int], columns: Sequence[Sequence[float]], memory: Sequence[float]
) -> None:
    """Drop tiles until they are few, and put others in their places as the best of bands."""
    least = [together(column[first], us) for column, first, us in zip(columns, best, memory, strict=True)]
    second, losses = best.copy(), [0.0] * len(best)

    def look(band: int) -> None:
        """See which tile would serve a band without its best, and what would be lost."""
        column, us = columns[band], memory[band]
        second[band] = min([i for i in kept if i != best[band]], key=column.__getitem__)
        loss = together(column[second[band]], us) - together(column[best[band]], us)
        losses[band] = BAND_WEIGHTS[band] * loss / least[band]

    for band in range(len(best)):
        look(band)
    while len(kept) > MAX_MENU:
        missed = dict.fromkeys(kept, 0.0)
        for first, loss in zip(best, losses, strict=True):
            missed[first] += loss
        gone = min(kept, key=missed.__getitem__)
        kept.remove(gone)
        for band in range(len(best)):
            if gone in (best[band], second[band]):
                best[band] = second[band] if best[band] == gone else best[band]
                look(band)


def band_of(m: int) -> int:
    """The place in BANDS of a size of batch; what is larger than all goes to the last."""
    return (m - 1) >> 3 if m <= 128 else min(14 + ((m - 1) >> 6), len(BANDS) - 1)


def tuned_tile(m: int, n: int, k: int, output: Output, gpu: Gpu) -> Tile | None:
    """The tile that the user's table has for this very product on this GPU."""
    tiles = tuned_tiles()
    return tiles.get((m, n, k, output, gpu.name, gpu.num_sms)) if tiles else None


@cache
def tuned_tiles() -> dict[Product, Tile]:
    """All that the user's table has, if there is one.

    An entry whose tile is chosen no more, or not for this product, is told of and left out: it was right with the
    version that wrote it, and a table that grew old must not stop a program.
    """
    found, path = {}, settings().tuned_table
    for entry in () if path is None else read_table(path):
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
    reason = on_weight(
        tile, entry.n, entry.k, entry.output, replace(gpu, num_sms=entry.num_sms), timings_of(gpu)
    ).why_not(entry.m)
    if reason is not None:
        return None, f"tile: expected one that can run it, got {entry.tile}: {reason}"
    return tile, None


def reachable() -> list[GemmConfig]:
    """Every configuration of `fp8_gemm` that `select` can give: all compile without spills, which the tests see to."""
    found = [
        tile.config(output, BLOCK_K * (BLOCKS_OF_RUNS + blocks_left))
        for blocks_left in range(BLOCKS_OF_RUNS)
        for output in OUTPUTS_BY_NAME.values()
        for tile in tiles_for(output)
    ]
    return list(dict.fromkeys(config for config in found if isinstance(config, GemmConfig)))


def reachable_decode(operands: Operands = USUAL_OPERANDS) -> list[DecodeConfig]:
    """Every configuration of the decode kernel that `select` can give for such operands."""
    found = [tile.config(output, BLOCK_K) for output in OUTPUTS_OF[operands] for tile in TILES_OF[operands]]
    return list(dict.fromkeys(config for config in found if isinstance(config, DecodeConfig)))
