"""The cost of a product with a tile: a time in microseconds on a named GPU.

    time     = launch_us + (multiply^3 + memory^3)^(1/3)
    multiply = rounds * (blocks of k * block + tile_us + store + split_us if k is split)
               + blocks of k * fp4_alone_ns         of the decode kernel with an FP4 weight, and launch_us for each
                                                    time that its CTAs fill the GPU, but the first
    block    = block_ns + operations / sm_tflops     of fp8_gemm, and by_row times that if B's scales come by row,
               or convert_ns more if B is FP4; and for each part of it beside the first part_ns + part_ps * elements
               of a tile, of which half where parts may fold (in the decode kernel half of part_ps, and no part_ns)
    block    = bytes of A and B / load_gb_per_s      of the decode kernel
    block    = columns / 64 * (fp4_ns + rows * fp4_token_ns)    of the decode kernel with an FP4 weight
    store    = store_us * (elements of a tile / 32768)^1.5, for BF16; for more bytes as often
    memory   = bytes / dram_tb_per_s + evict_us * (1 - e^(-bytes / L2))

In a round all SMs take a tile each; two CTAs on an SM take twice as long, so theirs counts as two. (With an FP4 weight
an SM's CTAs of the decode kernel take what their number asks, however many fit.) Multiplying and memory go on at the
same time: the longer of the two decides, and where they are alike each is in the other's way, which the exponent
stands for. Rows across lines of the L2 may take longer to load than to multiply. timings.json has the constants, and
timings.py says what they are.

Memory takes the same with any tile, so that the tile of the lowest cost is the one that multiplies fastest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..core.check.layout import ceil_div
from ..core.check.recipes import E2M1
from ..core.gpu import Gpu
from .config import BLOCK_K
from .output import Groups, Output
from .tiles import BLOCKS_OF_RUNS, Tile
from .timings import Timings

L2_MB = 50
"""Megabytes of the L2 of an H100 and an H200."""
MOST_DECODE_ROWS = 128
"""Up to how many rows the decode kernel multiplies: two of its highest tiles."""
CLUSTERS_AT_ONCE = {1: (132, 264), 2: (66, 132), 3: (39, 79), 4: (30, 62), 5: (22, 47), 6: (20, 42), 8: (15, 30)}
"""Clusters that 132 SMs run at a time, by their CTAs, with one and with two CTAs on an SM: the driver says so."""
NUM_SMS = 132
SECTOR_BYTES = 32
"""The L2 gives parts of so many bytes of its lines of 128."""


class Estimate(NamedTuple):
    """The time of a product with a tile, and its parts."""

    tile: Tile
    tiles: float
    """Tiles of D, or clusters of them; of groups the expected number."""
    rounds: float
    multiply_us: float
    memory_us: float
    cost_us: float
    """The whole; infinite if it cannot run."""
    why_not: str | None = None
    """The reason why it cannot run; None if it can."""


class OnWeight(NamedTuple):
    """A tile put to one weight: what multiplying takes that does not depend on m."""

    tile: Tile
    rows: int
    """Rows of D that a cluster computes."""
    clusters_n: int
    at_once: int
    """Clusters that run at a time."""
    uncrowded: int
    """How many of them do with a CTA on each SM."""
    round_us: float
    once_us: float
    """Time that one round takes longer than each of several does."""
    late_us: float
    """Time that CTAs of the decode kernel with an FP4 weight take longer if they do not all fit on the GPU at once."""
    straddling_us: float
    """Time of the L2 for a cluster's rows of A and B that lie across its lines, else 0."""
    least_m: int
    most_m: int
    never: str | None
    """The reason why it cannot run with this weight whatever m is; None if it can."""

    def rounds(self, clusters: int) -> int:
        """Say how often all SMs take a tile."""
        rounds = ceil_div(clusters, self.at_once)
        return rounds if clusters <= self.uncrowded else rounds * self.tile.ctas_per_sm

    def multiply_us(self, ms: Sequence[int]) -> list[float]:
        """Estimate the time of multiplying for each size of batch, smaller ones first; infinite if it cannot run."""
        _, rows, clusters_n, at_once, uncrowded, round_us, once_us, late_us, straddling_us, low, high, _ = self
        crowded_us = round_us * self.tile.ctas_per_sm
        counts = [(m + rows - 1) // rows * clusters_n for m in ms if m <= high]
        us = [(c + at_once - 1) // at_once * (round_us if c <= uncrowded else crowded_us) + once_us for c in counts]
        if late_us:
            room = at_once * self.tile.ctas_per_sm
            us = [own + (c - 1) // room * late_us for own, c in zip(us, counts, strict=True)]
        if straddling_us:
            us = [max(own, c * straddling_us) for own, c in zip(us, counts, strict=True)]
        if low > 1:
            us = [own if m >= low else NEVER for own, m in zip(us, ms, strict=True)]
        return us + [NEVER] * (len(ms) - len(us))

    def estimate(self, m: int, memory_us: float, launch_us: float) -> Estimate:
        """Estimate the time of a product of m rows, if memory takes so long."""
        clusters, why_not = ceil_div(m, self.rows) * self.clusters_n, self.why_not(m)
        (us,) = self._replace(least_m=1, most_m=m).multiply_us((m,))
        cost_us = NEVER if why_not else launch_us + together(us, memory_us)
        return Estimate(self.tile, clusters, self.rounds(clusters), us, memory_us, cost_us, why_not)

    def why_not(self, m: int) -> str | None:
        """Say why it cannot run; None if it can."""
        if self.least_m <= m <= self.most_m:
            return None
        if self.never is not None:
            return self.never
        return "m is one tile" if m < self.least_m else "too many rows"


NEVER = float("inf")


def together(multiply_us: float, memory_us: float) -> float:
    """Estimate the time of two things that go on at the same time, and are in each other's way."""
    return float((multiply_us**3 + memory_us**3) ** (1 / 3))


def dense_memory_us(m: int, n: int, k: int, output: Output, timings: Timings) -> float:
    """Estimate the time of memory for a dense product."""
    return memory_us((bytes_of_weight(n, k, output) + m * row_bytes(n, k, output)) / 1e6, timings)


def memory_us(megabytes: float, timings: Timings) -> float:
    """Estimate the time of moving so much between DRAM and the SMs."""
    return megabytes / timings.dram_tb_per_s + timings.evict_us * (1 - math.exp(megabytes / -L2_MB))


def bytes_of_weight(n: int, k: int, output: Output) -> float:
    """Bytes of a weight: of FP4 half as many, and one for each 32."""
    return n * k * (17 / 32 if output.b == E2M1 else 1)


def row_bytes(n: int, k: int, output: Output) -> int:
    """Bytes of a row of A and one of D, as often as it moves."""
    return k + n * bytes_of_d(output)


def by_size(tile: Tile) -> float:
    """Compare storing a tile with storing one of 256x128: more by more than its size, as loads have less room."""
    return float((tile.block_m * tile.block_n / (256 * 128)) ** 1.5)


def bytes_of_d(output: Output) -> int:
    """Bytes that move for one element of D: stored, and read first if something is added to it."""
    return (4 if output.is_fp32 else 2) * (2 if output.with_c or output.adds_to_d else 1)


def on_weight(tile: Tile, n: int, k: int, output: Output, gpu: Gpu, timings: Timings) -> OnWeight:
    """Put a tile to a weight."""
    rows, columns, split, at_once, uncrowded, block_us, tile_us = _of_tile(tile, output, gpu, timings)
    blocks = (k + BLOCK_K - 1) // BLOCK_K
    never = None
    if split > 1 and blocks <= split:
        never = "k too short to split"
    elif tile.cluster_size > gpu.num_sms:
        never = "too few SMs for a cluster"
    share = (blocks + split - 1) // split
    if split > 1 and not tile.is_decode:  # shares are whole runs
        share = (share + BLOCKS_OF_RUNS - 1) // BLOCKS_OF_RUNS * BLOCKS_OF_RUNS
    return OnWeight(
        tile,
        rows,
        (n + columns - 1) // columns,
        at_once,
        uncrowded,
        share * block_us + tile_us,
        share * timings.fp4_alone_ns / 1e3 if tile.is_decode and output.b == E2M1 else 0.0,
        timings.launch_us if tile.is_decode and output.b == E2M1 else 0.0,
        (rows + columns) * blocks * _straddling_ps(k, timings) / 1e6,
        tile.block_m + 1 if tile.cluster_m > 1 else 1,
        0 if never else MOST_DECODE_ROWS if tile.is_decode else sys.maxsize,
        never,
    )


def _straddling_ps(k: int, timings: Timings) -> float:
    """Time of the L2 for 128 bytes of a row beyond what multiplying hides, by where rows begin."""
    if k % BLOCK_K == 0:
        return 0.0
    return timings.across_sectors_ps if k % SECTOR_BYTES else timings.across_lines_ps


@lru_cache(maxsize=2048)
def _of_tile(tile: Tile, output: Output, gpu: Gpu, timings: Timings) -> tuple[int, int, int, int, int, float, float]:
    """Give all that depends on neither weight nor batch, in the order in which `on_weight` takes it."""
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
    if output.groups != Groups.DEPTHS:  # along k a tile is stored while the next is multiplied
        tile_us += timings.store_us * by_size(tile) * bytes_of_d(output) / 2
    if tile.cluster_k > 1:
        tile_us += elements * timings.decode_split_ns / 1e3 if tile.is_decode else timings.split_us
        if not tile.is_decode and (output.with_c or output.adds_to_d):  # read when the sums are there
            tile_us += elements * timings.split_c_ns / 1e3
    alone, crowded = (max(count * gpu.num_sms // NUM_SMS, 1) for count in CLUSTERS_AT_ONCE[tile.cluster_size])
    rows, columns = tile.block_m * tile.cluster_m, tile.block_n * tile.cluster_n
    if tile.is_decode and output.b == E2M1:
        return rows, columns, tile.cluster_k, alone, sys.maxsize, block_us, tile_us
    return rows, columns, tile.cluster_k, crowded if tile.is_decode else alone, alone, block_us, tile_us
