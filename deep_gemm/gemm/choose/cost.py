"""The cost of a product with a tile: a time in microseconds on a named GPU.

    time     = launch_us + (multiply^3 + memory^3)^(1/3)
    multiply = rounds * (blocks of k * block + tile_us + store + split_us if k is split)
               + blocks of k * fp4_alone_ns         of the decode kernel with an FP4 weight, and launch_us for each
                                                    wave of its CTAs after the first
    block    = block_ns + operations / sm_tflops     of fp8_gemm; times by_row if B has scales by row; plus convert_ns
               if B is FP4; plus, for each part of a k-block but the first, part_ns + part_ps * elements of a tile
               (half of part_ps if parts with equal scales are promoted at once; decode kernel: always half, no part_ns)
    block    = bytes of A and B / load_gb_per_s      of the decode kernel
    block    = columns / 64 * (fp4_ns + rows * fp4_token_ns)    of the decode kernel with an FP4 weight
    store    = store_us * (elements of a tile / 32768)^1.5, for BF16; in proportion to the bytes of an element
    memory   = bytes / dram_tb_per_s + evict_us * (1 - e^(-bytes / L2))

In a round each SM computes a tile; two CTAs on an SM take twice as long, so their round counts as two. (The decode
kernel with an FP4 weight takes longer with each CTA on an SM, even if all fit at once.) Multiplying and memory overlap:
the longer of the two decides. If they take about equally long, each delays the other; the exponent models that. Rows
that straddle lines of the L2 may take longer to load than to multiply. timings.json has the constants, and timings.py
explains them. Memory takes equally long with every tile, so the tile of the lowest cost multiplies fastest.

For groups of rows the cost uses the expected number of tiles; by ids, the product takes at least the time to find the
groups. The host knows the number of all rows, or roughly the number in a group. Group sizes are assumed to vary:

- like an exponential distribution if rows are stacked, as experts' tokens do: a group of x rows on average then has
  1 / (1 - exp(-block_m / x)) tiles along m on average: about 1 for small x, x / block_m + 1 / 2 for large x
- evenly from 0.7 to 1.3 of `expected_m` if that is given

All groups along k have equally many tiles, and the host need not know their depths. CTAs take tiles so that their
depths add up to about the same (gemm/work/k_scheduler.cuh), so the cost counts rounds of tiles of the average depth.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from math import log
from typing import Any, NamedTuple

from ...core.check.layout import ceil_div
from ...core.check.recipes import E2M1
from ...core.gpu import WGMMA_ROWS, Gpu
from ..config.of_tile import tile_config
from ..config.tall import BLOCK_K
from ..kinds.output import Output, Sizes
from ..kinds.works import LOW_TILE
from .tiles import BLOCKS_OF_RUNS, SHARING_A, Tile, pairs_up, wants_pairs
from .timings import Timings

BANDS = (*range(8, 129, 8), *range(192, 8193, 64))
"""The largest m of each band. Within a band no tile needs more rounds for one m than for another."""
BAND_WEIGHTS = tuple(log(end / begin) for begin, end in pairwise((4, *BANDS)))
"""Weight of a band when tiles are picked: each doubling of m weighs the same."""
MOST_FOUND, MANY_FOUND = 256, 3
"""The most rows of a group that take time to find; factor on the speed of finding if tiles have more than 64 rows."""
SPREAD = tuple(0.7 + 0.6 * (i + 0.5) / 12 for i in range(12))
"""Sizes of a group in the model, as parts of `expected_m`."""
L2_MB = 50
"""Megabytes of the L2 of an H100 and an H200."""
MOST_DECODE_ROWS = 128
"""The decode kernel multiplies at most this many rows: two of its highest tiles."""
CLUSTERS_AT_ONCE = {1: (132, 264), 2: (66, 132), 3: (39, 79), 4: (30, 62), 5: (22, 47), 6: (20, 42), 8: (15, 30)}
"""Clusters that 132 SMs run at a time, by CTAs of a cluster: if an SM has one CTA, or two. From the CUDA driver."""
NUM_SMS = 132
SECTOR_BYTES = 32
"""The L2 is read in sectors of this many bytes (a line is 128)."""


class Estimate(NamedTuple):
    """The time of a product with a tile, and its parts."""

    tile: Tile
    tiles: float
    """Tiles of D, or clusters of tiles; the expected number if rows are grouped."""
    rounds: float
    multiply_us: float
    memory_us: float
    cost_us: float
    """The estimated time in all; infinite if the tile cannot run."""
    why_not: str | None = None
    """The reason why the tile cannot run; None if it can."""
    config: Any = None
    """The configuration with this tile, to show to a person."""


class OnWeight(NamedTuple):
    """A tile used for one weight, with the parts of its time that do not depend on m."""

    tile: Tile
    rows: int
    """Rows of D that a cluster computes."""
    clusters_n: int
    at_once: int
    """Clusters that run at a time."""
    uncrowded: int
    """Clusters that run at a time if each SM has one CTA."""
    round_us: float
    once_us: float
    """Time that is added once, for any number of rounds."""
    late_us: float
    """Extra time of the decode kernel with an FP4 weight for each wave of CTAs after the first."""
    straddling_us: float
    """Time of the L2 for a cluster's rows of A and B that straddle its lines, else 0."""
    least_m: int
    most_m: int
    never: str | None
    """The reason why the tile cannot run with this weight for any m; None if it can."""

    def rounds(self, clusters: int) -> int:
        """Count the rounds in which each SM computes a tile."""
        rounds = ceil_div(clusters, self.at_once)
        return rounds if clusters <= self.uncrowded else rounds * self.tile.ctas_per_sm

    def multiply_us(self, ms: Sequence[int]) -> list[float]:
        """Estimate the time of multiplying for each m of `ms`, which ascend; infinite if the tile cannot run."""
        _, rows, clusters_n, at_once, uncrowded, round_us, once_us, late_us, straddling_us, low, high, _ = self
        crowded_us = round_us * self.tile.ctas_per_sm
        different, places = _tiles_along_m(tuple(ms), rows, high)
        counts = [tiles * clusters_n for tiles in different]
        us = [(c + at_once - 1) // at_once * (round_us if c <= uncrowded else crowded_us) + once_us for c in counts]
        if late_us:
            room = at_once * self.tile.ctas_per_sm
            us = [own + (c - 1) // room * late_us for own, c in zip(us, counts, strict=True)]
        if straddling_us:
            us = [max(own, c * straddling_us) for own, c in zip(us, counts, strict=True)]
        us = [us[place] for place in places]
        if low > 1:
            us = [own if m >= low else NEVER for own, m in zip(us, ms, strict=False)]
        return us + [NEVER] * (len(ms) - len(us))

    def estimate(self, m: int, memory_us: float, launch_us: float) -> Estimate:
        """Estimate the time of a product of m rows, if memory takes `memory_us`."""
        clusters, why_not = ceil_div(m, self.rows) * self.clusters_n, None
        if not self.least_m <= m <= self.most_m:
            why_not = self.never or ("m is one tile" if m < self.least_m else "too many rows")
        (us,) = self._replace(least_m=1, most_m=m).multiply_us((m,))
        cost_us = NEVER if why_not else launch_us + together(us, memory_us)
        return Estimate(self.tile, clusters, self.rounds(clusters), us, memory_us, cost_us, why_not)


@lru_cache(maxsize=256)
def _tiles_along_m(ms: tuple[int, ...], rows: int, high: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the different numbers of tiles of `rows` rows, for m of `ms` up to `high`, and each m's index in them."""
    tiles = [(m + rows - 1) // rows for m in ms if m <= high]
    different = tuple(dict.fromkeys(tiles))
    return different, tuple(map(different.index, tiles))


NEVER = float("inf")


def together(multiply_us: float, memory_us: float) -> float:
    """Estimate the time of two activities that run at the same time and delay each other."""
    return float((multiply_us**3 + memory_us**3) ** (1 / 3))


def dense_memory_us(ms: Sequence[int], n: int, k: int, output: Output, timings: Timings) -> list[float]:
    """Estimate the time of memory for a dense product, for each m of `ms`."""
    of_weight, of_row = bytes_of_weight(n, k, output), row_bytes(n, k, output)
    return [memory_us((of_weight + m * of_row) / 1e6, timings) for m in ms]


def memory_us(megabytes: float, timings: Timings) -> float:
    """Estimate the time of moving these megabytes between DRAM and the SMs."""
    return megabytes / timings.dram_tb_per_s + timings.evict_us * (1 - math.exp(megabytes / -L2_MB))


def bytes_of_weight(n: int, k: int, output: Output) -> float:
    """Count bytes of a weight; FP4 has half a byte for each value, and a scale of one byte for each 32 values."""
    return n * k * (17 / 32 if output.b == E2M1 else 1)


def row_bytes(n: int, k: int, output: Output) -> int:
    """Count bytes that memory moves for a row of A and a row of D."""
    return k + n * bytes_of_d(output)


def by_size(tile: Tile) -> float:
    """Return a tile's time to store, relative to 256x128. Large tiles take longer per element: loads get less room."""
    return float((tile.block_m * tile.block_n / (256 * 128)) ** 1.5)


def bytes_of_d(output: Output) -> int:
    """Count bytes that memory moves for an element of D: stored, and read first if the product is added to C or D."""
    return (4 if output.is_fp32 else 2) * (2 if output.with_c or output.adds_to_d else 1)


def on_weight(tile: Tile, n: int, k: int, output: Output, gpu: Gpu, timings: Timings) -> OnWeight:
    """Compute the parts of a tile's time for a weight that do not depend on m."""
    rows, columns, split, at_once, uncrowded, block_us, tile_us = _of_tile(tile, output, gpu, timings)
    blocks = (k + BLOCK_K - 1) // BLOCK_K
    never = None
    if split > 1 and blocks <= split:
        never = "k too short to split"
    elif tile.cluster_size > gpu.num_sms:
        never = "too few SMs for a cluster"
    share = (blocks + split - 1) // split
    if split > 1 and not tile.is_decode:  # each CTA's share of k is whole runs
        share = (share + BLOCKS_OF_RUNS - 1) // BLOCKS_OF_RUNS * BLOCKS_OF_RUNS
    # Time of the L2 for 128 bytes of a row beyond the time that multiplying hides: it depends on where rows begin.
    across = timings.across_sectors_ps if k % SECTOR_BYTES else timings.across_lines_ps
    straddling_ps = across if k % BLOCK_K else 0.0
    return OnWeight(
        tile,
        rows,
        (n + columns - 1) // columns,
        at_once,
        uncrowded,
        share * block_us + tile_us,
        share * timings.fp4_alone_ns / 1e3 if tile.is_decode and output.b == E2M1 else 0.0,
        timings.launch_us if tile.is_decode and output.b == E2M1 else 0.0,
        (rows + columns) * blocks * straddling_ps / 1e6,
        tile.block_m + 1 if tile.cluster_m > 1 else 1,
        0 if never else MOST_DECODE_ROWS if tile.is_decode else sys.maxsize,
        never,
    )


def band_of(m: int) -> int:
    """Find the index of m's band in BANDS; an m beyond the last band belongs to the last."""
    return (m - 1) >> 3 if m <= 128 else min(14 + ((m - 1) >> 6), len(BANDS) - 1)


def rows_alike(m: int) -> tuple[int, int]:
    """Return the smallest and largest number of stacked rows, or depth, with the same choice as m: within m / 16."""
    step = 1 << max((m - 1).bit_length() - 5, 0)
    last = -(-m // step) * step
    return last - step + 1, last


def alike(sizes: Sizes, output: Output) -> Sizes:
    """Replace stacked rows, or depths, by the largest number that shares their choice."""
    if output.work.is_along_k:
        return sizes._replace(k=rows_alike(max(sizes.k, 1))[1])
    if not output.work.is_stacked or not sizes.groups:
        return sizes
    return sizes._replace(m=rows_alike(max(round(sizes.m * sizes.groups), 1))[1] / sizes.groups)


def estimate(tile: Tile, sizes: Sizes, output: Output, gpu: Gpu, timings: Timings) -> Estimate:
    """Estimate the time of a product, or of all its heads or groups."""
    offer = on_weight(tile, sizes.n, sizes.k, output, gpu, timings)
    if output.work.groups_rows:
        return _of_rows(offer, sizes, output, timings)
    m, n, k, groups = int(sizes.m), sizes.n, sizes.k, sizes.groups
    moving_us = memory_us(groups * (bytes_of_weight(n, k, output) + m * row_bytes(n, k, output)) / 1e6, timings)
    if not output.work.is_along_k:  # like a dense product with the tiles of all heads
        return offer._replace(clusters_n=offer.clusters_n * groups).estimate(m, moving_us, timings.launch_us)
    # A tile takes as long as its own products or as adding the previous tile to D, whichever is longer.
    tiles = groups * ceil_div(m, offer.rows) * offer.clusters_n
    rounds = offer.rounds(tiles)
    add_us = timings.add_us * by_size(tile) if output.with_c or output.adds_to_d else 0.0
    multiply_us = rounds * max(offer.round_us, add_us)
    why_not = "odd tiles along n" if tile == SHARING_A and not (pairs_up(n) or wants_pairs(output)) else None
    cost_us = NEVER if why_not else timings.launch_us + together(multiply_us, moving_us)
    return Estimate(tile, tiles, rounds, multiply_us, moving_us, cost_us, why_not)


def _of_rows(offer: OnWeight, sizes: Sizes, output: Output, timings: Timings) -> Estimate:
    """Estimate the time of a product of groups of rows, with an expected number of tiles."""
    tile, (m, n, k, groups) = offer.tile, sizes
    are_cut, end_low = _last_tiles(tile, output)
    half = 0.5**timings.part_power if are_cut else 1.0  # time of a last round of few tiles
    busy = groups * min(m, 1.0)  # groups with rows
    per_tile = offer.clusters_n / min(offer.at_once, offer.uncrowded)  # two CTAs on an SM take twice as long
    if output.work.has_planes:
        # The rows of one group may differ much from m; the sum over several groups is close to m per group.
        parts = [_tiles_of_group(tile.block_m, part * max(m, 1.0), end_low, timings) for part in SPREAD]
        tiles, work = (sum(of_parts) / len(parts) for of_parts in zip(*parts, strict=True))
        totals = [of_part for of_part, _ in parts] if groups == 1 else [busy * tiles]
        rounds = sum(_rounds(total * per_tile, half) for total in totals) / len(totals)
    else:
        tiles = 1 / -math.expm1(-tile.block_m / max(m, 1.0))
        low = math.expm1(-WGMMA_ROWS / max(m, 1.0))
        work = tiles * (1 + low * (1 - _share(tile.block_m, WGMMA_ROWS, timings)))
        rounds = max(busy * tiles * per_tile + half / 2, 1.0)  # a last round is half full on average
    multiply_us = rounds * work / tiles * offer.round_us
    moving_us = memory_us((busy * bytes_of_weight(n, k, output) + groups * m * row_bytes(n, k, output)) / 1e6, timings)
    finding_us = 0.0
    if output.work.reads_ids and not tile.is_decode:
        rows_found_us = min(max(m, 1.0), MOST_FOUND) * timings.find_row_ns / 1e3
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
    """Estimate how long CTAs are busy, in units of a whole tile, if tiles make `full` full rounds."""
    return math.floor(full) + half if 0 < full % 1 <= 0.5 else math.ceil(full)


def _tiles_of_group(block_m: int, rows: float, end_low: bool, timings: Timings) -> tuple[int, float]:
    """Count the tiles along m of a group, and their time in units of a whole tile's time.

    The last of several tiles begins earlier and stays whole, unless the tile may be short.
    """
    tiles = math.ceil(rows / block_m)
    last = rows - (tiles - 1) * block_m if tiles == 1 or end_low else block_m
    return tiles, tiles - 1 + _share(block_m, last, timings)


def _share(block_m: int, rows: float, timings: Timings) -> float:
    """Return the part of a whole tile's time that `rows` rows take: a warpgroup multiplies 64 at a time."""
    return float(min(math.ceil(rows / WGMMA_ROWS) * WGMMA_ROWS / block_m, 1.0) ** timings.part_power)


@lru_cache(maxsize=2048)
def _of_tile(tile: Tile, output: Output, gpu: Gpu, timings: Timings) -> tuple[int, int, int, int, int, float, float]:
    """Compute the parts of a cost that depend on neither weight nor m, in the order that `on_weight` unpacks."""
    elements = tile.block_m * tile.block_n
    if tile.is_decode and output.b == E2M1:
        block_us = tile.block_n / 64 * (timings.fp4_ns + tile.block_m * timings.fp4_token_ns) / 1e3
    elif tile.is_decode:
        block_us = (tile.block_m + tile.block_n) * BLOCK_K / timings.load_gb_per_s / 1e3
    else:
        block_us = timings.block_ns / 1e3 + 2 * elements * BLOCK_K / timings.sm_tflops / 1e6
    part_us = elements * timings.part_ps / 1e6
    if tile.is_decode or output.folds_parts:
        part_us /= 2
    block_us += (output.parts - 1) * (part_us if tile.is_decode else part_us + timings.part_ns / 1e3)
    if output.loads_sfb:
        block_us *= timings.by_row
    if output.b == E2M1 and not tile.is_decode:
        block_us += timings.convert_ns / 1e3
    tile_us = timings.tile_us
    if not output.work.is_along_k:  # along k a tile is stored while the next is multiplied
        tile_us += timings.store_us * by_size(tile) * bytes_of_d(output) / 2
    if tile.cluster_k > 1:
        tile_us += elements * timings.decode_split_ns / 1e3 if tile.is_decode else timings.split_us
        if not tile.is_decode and (output.with_c or output.adds_to_d):  # C is read once the sums are there
            tile_us += elements * timings.split_c_ns / 1e3
    alone, crowded = (max(count * gpu.num_sms // NUM_SMS, 1) for count in CLUSTERS_AT_ONCE[tile.cluster_size])
    rows, columns = tile.block_m * tile.cluster_m, tile.block_n * tile.cluster_n
    if tile.is_decode and output.b == E2M1:
        return rows, columns, tile.cluster_k, alone, sys.maxsize, block_us, tile_us
    return rows, columns, tile.cluster_k, crowded if tile.is_decode else alone, alone, block_us, tile_us
