"""Choose the tile that multiplies grouped rows.

The host knows how many rows there are in all, or about how many each group has. The cost is that of cost.py with an
expected number of tiles, and by ids at least what finding groups takes. Group sizes are taken to be spread

    if rows are stacked, like an exponential distribution, as the tokens of experts are: a group of x rows on average
    then has 1 / (1 - exp(-block_m / x)) tiles along m on average, one if it is small, half a tile too many if large
    if `expected_m` is given, evenly from 0.7 to 1.3 of it
"""

from __future__ import annotations

import math
from functools import cache, lru_cache

from ...core.check.recipes import E2M1, E4M3, PER_64, PER_BLOCK, PER_ROW
from ...core.gpu import Gpu
from ...core.sm90 import WGMMA_ROWS
from ..config import BLOCK_K, LOW_TILE, GemmConfig
from ..config_decode import DecodeConfig
from ..config_of_tile import tile_config
from ..cost import Estimate, bytes_of_weight, memory_us, on_weight, row_bytes, together
from ..output import FINE_OPERANDS, FP4_OPERANDS, OPERANDS_BY_ROW, USUAL_OPERANDS, Groups, Output
from ..tiles import Tile
from ..timings import Timings, timings_of

TILES = (Tile(64, 128), Tile(128, 128), Tile(128, 160), Tile(128, 192), Tile(128, 256))
TILES_COUNTS = (*TILES, Tile(256, 128))
"""Tiles for rows that are not stacked, whose scales one TMA box of 256 rows brings."""
HIGH_TILE = 128
"""Rows of a tile of which a group of FP8 rows that are not stacked may have several: in higher ones, of which the last
is cut, products took up to 29% longer on an H100."""
TILES_PER_ROW = (Tile(64, 64), Tile(64, 128), Tile(128, 96))
"""Rows of B with scales of their own leave too few registers for 128 x 128."""
TILES_FINE = (Tile(64, 128), Tile(128, 128))
"""Tiles for scales of fewer than 128 columns."""
TILES_CHUNKS = (*TILES_FINE, Tile(256, 128))
"""The same if blocks of B are smaller than 128 x 128, and one TMA box brings the scales of A."""
TILES_FP4 = (Tile(64, 128), Tile(128, 64), Tile(128, 128))
"""Threads that convert B leave registers for no wider ones, and for higher ones if D is BF16 in order."""
FEW_FP4 = Tile(8, 64, is_decode=True, crowd=4)
"""The tile of the decode kernel: on an H100 it gains 7 to 10% if groups have up to 8 rows, higher ones nothing."""
FEW = (Tile(8, 64, is_decode=True), Tile(16, 128, is_decode=True))
"""The same in FP8: low ones for few tiles, wide ones for many of few k-blocks."""
MOST_FEW = 16
"""Rows of a group, about, up to which these are taken: each tile of more rows reads the weight again, from the L2."""
LEAD = 0.97
"""The decode kernel is to cost at most this part of `fp8_gemm`: nearer than that they were level on an H100."""
TILES_SILU = (Tile(64, 128), Tile(128, 128), Tile(128, 256))
"""A warpgroup has 128 columns, gates and ups of whole scales; a tile has one block of B's scales of each."""
TILES_APART = (Tile(64, 256), Tile(128, 256))
"""Gate and up of the same columns in two units of one warpgroup."""

MOST_FOUND, MANY_FOUND = 256, 3
"""Rows of a group beyond which more take no more time to find, and how many times as fast each is in high tiles."""
SPREAD = tuple(0.7 + 0.6 * (i + 0.5) / 12 for i in range(12))
"""Rows of a group, as parts of `expected_m`."""


@lru_cache(maxsize=4096)
def select_grouped(
    num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu, *, decodes: bool = True
) -> GemmConfig | DecodeConfig:
    """The configuration with the lowest cost for groups of `rows` rows on average.

    Without `decodes` none of the decode kernel, whose grid cannot be held to some of the SMs. It adds up scales of FP4
    that do not fold in another order than `fp8_gemm`.
    """
    timings = timings_of(gpu)
    return grouped_config(chosen_tile(num_groups, rows, n, k, output, gpu, timings, decodes=decodes), output, k)


@lru_cache(maxsize=4096)
def grouped_config(tile: Tile, output: Output, k: int) -> GemmConfig | DecodeConfig:
    """The kernel's configuration for a tile."""
    if tile.is_decode:
        return tile.config(output, k)
    return tile_config(tile.block_m, tile.block_n, output, k=k)


def chosen_tile(
    num_groups: int,
    rows: float,
    n: int,
    k: int,
    output: Output,
    gpu: Gpu,
    timings: Timings,
    *,
    decodes: bool = True,
) -> Tile:
    """The tile of `select_grouped`, by these timings."""

    def cost(tile: Tile) -> float:
        own = estimate(tile, num_groups, rows, n, k, output, gpu, timings).cost_us
        return own / LEAD if tile in FEW else own

    takes_few = decodes and (output.b == E2M1 or rows <= MOST_FEW)
    return min((tile for tile in tiles_for_rows(output, rows) if takes_few or not tile.is_decode), key=cost)


def tiles_for_rows(output: Output, rows: float) -> list[Tile]:
    """The tiles that there are for groups of `rows` rows on average."""
    highest = HIGH_TILE if output.groups == Groups.COUNTS and output.b == E4M3 and output.parts == 1 else 256
    return [tile for tile in tiles_for(output) if tile.block_m <= highest or rows * SPREAD[-1] <= tile.block_m]


def estimate(
    tile: Tile, num_groups: int, rows: float, n: int, k: int, output: Output, gpu: Gpu, timings: Timings
) -> Estimate:
    """Estimate how long the product takes."""
    offer = on_weight(tile, n, k, output, gpu, timings)
    are_cut, end_low = _last_tiles(tile, output)
    half = 0.5**timings.part_power if are_cut else 1.0  # of a last round of few tiles
    busy = num_groups * min(rows, 1.0)  # groups that have rows
    per_tile = offer.clusters_n / min(offer.at_once, offer.uncrowded)  # two CTAs on an SM take twice as long
    if output.groups == Groups.COUNTS:
        # One group's rows may be far from `rows`, those of several are close to it in all.
        parts = [_tiles_of_group(tile.block_m, part * max(rows, 1.0), end_low, timings) for part in SPREAD]
        tiles, work = (sum(of_parts) / len(parts) for of_parts in zip(*parts, strict=True))
        totals = [of_part for of_part, _ in parts] if num_groups == 1 else [busy * tiles]
        rounds = sum(_rounds(total * per_tile, half) for total in totals) / len(totals)
    else:
        tiles = 1 / -math.expm1(-tile.block_m / max(rows, 1.0))
        low = math.expm1(-WGMMA_ROWS / max(rows, 1.0))
        work = tiles * (1 + low * (1 - _share(tile.block_m, WGMMA_ROWS, timings)))
        rounds = max(busy * tiles * per_tile + half / 2, 1.0)  # a last round is half full on average
    multiply_us = rounds * work / tiles * offer.round_us
    moving_us = memory_us(
        (busy * bytes_of_weight(n, k, output) + num_groups * rows * row_bytes(n, k, output)) / 1e6, timings
    )
    finding_us = 0.0
    if output.groups == Groups.IDS and not tile.is_decode:
        rows_found_us = min(max(rows, 1.0), MOST_FOUND) * timings.find_row_ns / 1e3
        is_high = tile.block_m > LOW_TILE
        finding_us = busy * (timings.find_group_us + rows_found_us / MANY_FOUND if is_high else rows_found_us)
    cost_us = timings.launch_us + timings.find_us + max(together(multiply_us, moving_us), finding_us)
    return Estimate(tile, busy * tiles * offer.clusters_n, rounds, multiply_us, moving_us, cost_us)


@cache
def _last_tiles(tile: Tile, output: Output) -> tuple[bool, bool]:
    if tile.is_decode:
        return False, False
    config = tile_config(tile.block_m, tile.block_n, output)
    return config.cuts_last_tiles, config.has_short_tiles


def _rounds(full: float, half: float) -> float:
    """Say how long CTAs are busy, in whole tiles, with tiles for so many full rounds."""
    return math.floor(full) + half if 0 < full % 1 <= 0.5 else math.ceil(full)


def _tiles_of_group(block_m: int, rows: float, end_low: bool, timings: Timings) -> tuple[int, float]:
    """Say how many tiles along m a group has, and what they take, in whole tiles.

    The last of several is moved up, so as to be whole, unless it may end low.
    """
    tiles = math.ceil(rows / block_m)
    last = rows - (tiles - 1) * block_m if tiles == 1 or end_low else block_m
    return tiles, tiles - 1 + _share(block_m, last, timings)


def _share(block_m: int, rows: float, timings: Timings) -> float:
    """The part of a whole tile's time that a tile takes if it has so many rows, which warpgroups take 64 at a time."""
    return float(min(math.ceil(rows / WGMMA_ROWS) * WGMMA_ROWS / block_m, 1.0) ** timings.part_power)


def tiles_for(output: Output) -> tuple[Tile, ...]:
    """The tiles that there are for a kind of product."""
    if output.sfb == PER_ROW and output.parts == 1:
        return TILES_PER_ROW
    if output.b == E2M1 and output.to_addresses:
        return TILES_FP4
    if output.has_chunks:
        return TILES_CHUNKS if output.groups == Groups.COUNTS or output.scale_parts == 1 else TILES_FINE
    if output.parts > 1 and (output.sfa, output.sfb) != (PER_64, PER_BLOCK):
        return TILES_FINE
    if output.b == E2M1:
        return (*TILES_FP4, FEW_FP4) if output.is_fp32 else (*TILES_FP4, Tile(256, 128), FEW_FP4)
    if output.activates:
        return TILES_APART if output.gates_apart else TILES_SILU
    usual = TILES_COUNTS if output.groups == Groups.COUNTS else TILES
    return usual if output.parts > 1 or output.to_addresses else (*usual, *FEW)


def reachable_grouped_decode() -> list[DecodeConfig]:
    """Every configuration of the decode kernel that `select_grouped` can give."""
    return [config for config in _reachable() if isinstance(config, DecodeConfig)]


def reachable_grouped() -> list[GemmConfig]:
    """Every configuration of `fp8_gemm` that `select_grouped` can give."""
    return [config for config in _reachable() if isinstance(config, GemmConfig)]


def _reachable() -> list[GemmConfig | DecodeConfig]:
    outputs = [
        Output(is_fp32=is_fp32, b=b, sfa=sfa, sfb=sfb, groups=groups)
        for groups in (Groups.IDS, Groups.ENDS, Groups.COUNTS)
        for is_fp32 in (False, True)
        for b, sfa, sfb in (USUAL_OPERANDS, OPERANDS_BY_ROW, FP4_OPERANDS, *FINE_OPERANDS)
    ]
    to_addresses = [
        Output(groups=Groups.ENDS, to_addresses=True, b=b, sfa=sfa, sfb=sfb)
        for b, sfa, sfb in ((E4M3, PER_ROW, PER_BLOCK), (E4M3, PER_64, PER_BLOCK), FP4_OPERANDS)
    ]
    found = [
        grouped_config(tile, output, BLOCK_K * blocks)
        for output in (*outputs, *to_addresses)
        for blocks in (4, 5)
        for tile in tiles_for(output)
    ]
    return list(dict.fromkeys(found))


def reachable_silu() -> list[GemmConfig]:
    """The same of rows that are activated."""
    found = [
        tile_config(tile.block_m, tile.block_n, silu, k=BLOCK_K * blocks)
        for silu in (
            Output(groups=Groups.ENDS, activates=True, gates_apart=apart, fetches=fetches)
            for fetches in (False, True)
            for apart in (False, True)
        )
        for blocks in (4, 5)
        for tile in tiles_for(silu)
    ]
    return list(dict.fromkeys(found))
