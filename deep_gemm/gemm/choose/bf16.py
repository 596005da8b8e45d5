"""Choose the tile that multiplies BF16 operands, and the number of slices that k is split into.

A row's bits must not depend on the number of rows. Tiles of every shape give the same bits, but another number of
slices gives other bits. So the weight alone decides the number of slices: `slices_of`. Each slice is summed from zero.
The sums are added in order, by a cluster with a CTA for each slice, or by one CTA that computes the slices in turn.

    time     = launch_us + (multiply^3 + memory^3)^(1/3)
    multiply = rounds * (blocks of k * block + tile_us + store)
    block    = BLOCK_US + the longest of: operations, shared memory read by the tensor cores, bytes of A and B to load
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
from math import gcd
from typing import NamedTuple

from ...core.check.layout import ceil_div
from ...core.gpu import WGMMA_ROWS, Gpu
from ..config.bf16 import BLOCK_K, Bf16Config, bf16_config
from ..config.of_tile import MATH_WARPGROUPS, MAX_ACCUMULATORS
from ..config.tall import K_MAJOR, Majors
from ..kinds.epilogues import BLOCK_SUMS, SILU_IN_BF16, TO_ADDRESSES_IN_BF16, TO_D, Epilogue
from ..kinds.output import BF16_OPERANDS, OUTPUTS_OF, Output, Sizes
from ..kinds.works import COUNTED, COUNTS, DENSE, ENDS, IDS, PARTS, SUM, Work
from .cost import BANDS, NEVER, NUM_SMS, alike, band_of, bytes_of_d, memory_us, together
from .timings import timings_of

OUTPUTS = OUTPUTS_OF[BF16_OPERANDS]
BF16, FP32 = OUTPUTS[0], OUTPUTS[2]
ACTIVATED = replace(BF16, work=ENDS, epilogue=SILU_IN_BF16)
"""Output of the first product of experts if the product activates its rows."""
OF_SUMS = replace(FP32, epilogue=BLOCK_SUMS)
"""Output of an output head whose logits are added up."""
TO_RANKS = replace(BF16, work=ENDS, epilogue=TO_ADDRESSES_IN_BF16)
"""Output of the second product of experts if it writes its rows to other GPUs."""
SM_TFLOPS = 7.0
"""BF16 teraflops of one SM's tensor cores."""
SHARED_KB_PER_US = 181.0
"""Kilobytes of shared memory that the tensor cores of one SM read in a microsecond: 128 bytes a cycle."""
LOAD_KB_PER_US = 170.0
"""Kilobytes of A and B that one SM loads in a microsecond."""
SHARED_LOAD_KB_PER_US = {"H100": 100.0}
"""`LOAD_KB_PER_US` of a GPU for products of more than `FEW_HIGH` tiles along m whose k is at least `DEEP` and whose
operands are larger than the L2. CTAs that share columns of B drift apart there, so the L2 has lost B when the next CTA
loads it. An H200 loads at its usual rate. Fitted to 15 products by 162 tiles: 1024 x 7168 x 16384 takes 405 us with
128x112, 316 with 128x160."""
DEEP, FEW_HIGH, L2_BYTES = 4096, 4, 60 << 20
BLOCK_US = 0.038
"""Time of a k-block besides multiplying and loading, equal for every size of tile."""
TILE_US = 0.21
"""Time of a tile besides its k-blocks: filling the ring, and starting to store."""
STORE_US = 1.26
"""Time to store a tile of 256x128 in BF16, without the part that overlaps with the next tile."""
SPLIT_US = 1.05
"""Time to add up the sums of a tile if CTAs split k."""
ALONE = 1.05
"""Factor on the time of a k-block if a CTA has one math warpgroup: no other warpgroup multiplies while it pauses."""
NARROW = 0.16
"""Added part of the time to store if panels have 32 columns, not 64; with 16 columns, three times this part."""
REREAD = 0.06
"""Cost of one more row of tiles that reads the same weight, as a part of the time to read the weight."""
REREAD_SPLIT = 0.55
"""`REREAD` if a cluster splits k: an H200 takes 1 to 3 us longer with two rows of tiles than with one."""
MOST_REREADS = 3
MOST_SLICES = 7
LEAST_SLICE = 1024
"""The least number of values of k in a slice."""
COLUMNS = 64
"""Columns of a tile for few rows."""
SPLITS_AT_ONCE = {2: 66, 3: 39, 4: 30, 5: 22, 6: 15, 7: 15}
"""Clusters that 132 SMs surely run at a time, by CTAs of a cluster: 18 of 6 or 7 CTAs took two rounds on an H200."""


class Tile(NamedTuple):
    """A tile, and the CTAs of a cluster along m and n; with `splits`, a cluster has one CTA for each slice of k."""

    block_m: int
    block_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    splits: bool = False

    def config(self, output: Output, majors: Majors, slices: int) -> Bf16Config:
        """Return the kernel's configuration for this tile."""
        cluster_k = slices if self.splits else 1
        clusters = self.cluster_m, self.cluster_n, cluster_k
        return _config(self.block_m, self.block_n, output, majors, *clusters, slices)

    def serves(self, majors: Majors, slices: int, output: Output) -> bool:
        """Tell whether the kernel can be built with this tile."""
        if self.splits and slices == 1:
            return False
        if output.epilogue.sums_blocks and self not in TILES_OF_SUMS:
            return False
        if majors.b_is_mn and self.block_n // self.cluster_m % WGMMA_ROWS:
            return False
        if majors.a_is_mn and self.block_m // self.cluster_n % WGMMA_ROWS:
            return False
        if majors.a_is_mn and self.block_m * self.block_n > 256 * 128:  # a register is spilled
            return False
        warpgroups = MATH_WARPGROUPS[self.block_m]
        sums, room = self.block_m * self.block_n // (warpgroups * 128), MAX_ACCUMULATORS[warpgroups]
        if slices == 1 or self.splits:
            return sums <= room
        if output.is_fp32 or (output.c_is_fp32 and sums * 2 > 160):  # C or store buffers take registers
            return output.is_fp32 and sums * 2 <= room
        return sums * 2 <= room or self == WIDE_IN_SLICES


_config = cache(bf16_config)

WIDE_IN_SLICES = Tile(128, 256, cluster_m=2)
"""The only tile that keeps sums of earlier slices in store buffers, since its registers have no room for them. A slice
then takes 1.3 to 2.3 us more; with 256x128 or 192x160 it takes 2 to 4. An FP32 output would spill."""
WIDE_SLICE_US = 1.6
"""Extra time of this tile for each slice after the first."""
TILES_OF_SUMS = (Tile(64, 128), Tile(64, 256), Tile(128, 128), WIDE_IN_SLICES, Tile(256, 128))
"""Tiles of whole blocks of columns, for a D with a sum for each block."""
TILES = (
    *(Tile(64, n) for n in (16, 32, 48, 64, 96, 128, 192, 256)),
    *(Tile(128, n) for n in (32, 64, 96, 112, 128, 144, 160, 192, 256)),
    *(Tile(192, n) for n in (96, 128, 160)),
    *(Tile(256, n) for n in (64, 96, 128, 192)),
    WIDE_IN_SLICES,
    Tile(256, 128, cluster_n=2),
    *(Tile(64, n, splits=True) for n in (32, 64)),
    *(Tile(128, n, splits=True) for n in (32, 64, 96, 128)),
)


def choose(sizes: Sizes, output: Output, majors: Majors, gpu: Gpu) -> Bf16Config:
    """Choose a configuration for any work but sums."""
    m, n, k, groups = alike(sizes, output) if output.work.groups_rows else sizes
    if output.work.groups_rows:
        return select_bf16_rows(groups, m, n, k, output, majors.b_is_mn, gpu)
    if output.work.may_be_empty:
        return select_bf16_depths(groups, int(m), n, output, gpu)
    return select_bf16(int(m), n, k, output, majors, gpu, groups)


def slices_of(n: int, k: int, majors: Majors, work: Work = DENSE, epilogue: Epilogue = TO_D) -> int:
    """Choose the number of slices of k, for any m: two rows of tiles, with a CTA for each slice, then fill the SMs.

    k is never split for gradients of weights, which have as many rows as a weight, nor for several products at once,
    nor if a part of a weight must have the bits of the whole.
    """
    if majors.a_is_mn or not work.may_split_k or epilogue.sums_blocks:
        return 1
    for_two_tiles = NUM_SMS // (2 * ceil_div(n, COLUMNS))
    return max(min(for_two_tiles, k // LEAST_SLICE, MOST_SLICES), 1)


@lru_cache(maxsize=4096)
def select_bf16(m: int, n: int, k: int, output: Output, majors: Majors, gpu: Gpu, planes: int = 1) -> Bf16Config:
    """Choose the configuration of the lowest cost, for `planes` products of one shape."""
    tile = chosen_tile(BANDS[band_of(m)] if m <= BANDS[-1] else m, n, k, output, majors, gpu, planes)
    return tile.config(output, majors, slices_of(n, k, majors, output.work, output.epilogue))


@lru_cache(maxsize=4096)
def chosen_tile(m: int, n: int, k: int, output: Output, majors: Majors, gpu: Gpu, planes: int = 1) -> Tile:
    """Return the tile that `select_bf16` chooses."""
    slices = slices_of(n, k, majors, output.work, output.epilogue)
    of_output = TILES_OF_SUMS if output.epilogue.sums_blocks else TILES
    tiles = [tile for tile in of_output if tile.serves(majors, slices, output)]
    return min(tiles, key=lambda tile: cost_us(tile, m, n, k, output, gpu, slices, planes))


def cost_us(tile: Tile, m: int, n: int, k: int, output: Output, gpu: Gpu, slices: int, planes: int = 1) -> float:
    """Estimate the product's time in microseconds."""
    block_m, block_n, cluster_m, cluster_n, splits = tile
    if cluster_m > 1 and m <= block_m:
        return NEVER
    at_once = SPLITS_AT_ONCE[slices] if splits else NUM_SMS // (cluster_m * cluster_n)
    at_once = max(at_once * gpu.num_sms // NUM_SMS, 1)
    clusters = planes * ceil_div(m, block_m * cluster_m) * ceil_div(n, block_n * cluster_n)
    if splits and clusters > at_once:
        return NEVER
    load = LOAD_KB_PER_US
    is_shared = ceil_div(m, block_m) > FEW_HIGH and cluster_m * cluster_n == 1 and not splits
    if is_shared and k >= DEEP and 2 * (m + n) * k > L2_BYTES:
        load = SHARED_LOAD_KB_PER_US.get(gpu.name, load)
    multiply_us = ceil_div(clusters, at_once) * tile_us(tile, m, k, output, slices, load)
    timings = timings_of(gpu)
    reread = REREAD_SPLIT if splits else REREAD
    weight = n * (1 + reread * min(ceil_div(m, block_m * cluster_m) - 1, MOST_REREADS))
    moved_us = memory_us(planes * (2 * k * (m + weight) + m * n * bytes_of_d(output)) / 1e6, timings)
    return timings.launch_us + together(multiply_us, moved_us)


def tile_us(tile: Tile, rows: float, k: float, output: Output, slices: int, load_kb_per_us: float) -> float:
    """Estimate microseconds of a tile, which loads at most `rows` rows of A."""
    block_m, block_n, _, _, splits = tile
    blocks = math.ceil(math.ceil(k / BLOCK_K) / (slices if splits else 1))
    operations_us = 2 * block_m * block_n * BLOCK_K / SM_TFLOPS / 1e6
    shared_us = block_m // 64 * (64 + block_n) * 128 / SHARED_KB_PER_US / 1e3
    load_us = (min(block_m, rows) + block_n) * 128 / load_kb_per_us / 1e3
    store_us = STORE_US * block_m * block_n / 32768 * bytes_of_d(output) / 2
    store_us *= 1 + NARROW * (64 // gcd(block_n, 64) - 1)
    once_us = TILE_US + store_us + (SPLIT_US if splits else 0.0)
    once_us += (slices - 1) * WIDE_SLICE_US if tile == WIDE_IN_SLICES else 0.0
    block_us = BLOCK_US + max(operations_us, shared_us, load_us)
    return blocks * block_us * (ALONE if MATH_WARPGROUPS[block_m] == 1 else 1.0) + once_us


ROWS_TILES = (Tile(64, 64), Tile(64, 128), Tile(64, 256), Tile(128, 64), Tile(128, 128), Tile(128, 256))
"""Tiles for groups of rows, without clusters."""
DEPTHS_TILES = (Tile(64, 64), Tile(128, 64), Tile(128, 128), Tile(128, 192), Tile(128, 256))
"""Tiles for groups along k."""


@lru_cache(maxsize=1024)
def select_bf16_rows(
    num_groups: int, rows: float, n: int, k: int, output: Output, b_is_mn: bool, gpu: Gpu
) -> Bf16Config:
    """Choose the configuration for groups of `rows` rows on average: a large tile, unless it leaves SMs idle."""
    height = 64 if rows <= 64 else 128
    tiles_m = num_groups * min(rows, 1.0) * math.ceil(rows / height)
    return grouped_tile(ROWS_TILES, height, tiles_m, n, output, gpu).config(output, Majors(b_is_mn=b_is_mn), 1)


@lru_cache(maxsize=1024)
def select_bf16_depths(num_groups: int, m: int, n: int, output: Output, gpu: Gpu) -> Bf16Config:
    """Choose the configuration for groups along k, each with all the tiles of m and n."""
    height = 64 if m <= 64 else 128
    tile = grouped_tile(DEPTHS_TILES, height, num_groups * ceil_div(m, height), n, output, gpu)
    return tile.config(output, Majors(True, True), 1)


def grouped_tile(tiles: tuple[Tile, ...], height: int, tiles_m: float, n: int, output: Output, gpu: Gpu) -> Tile:
    """Choose the widest tile of this height that leaves no SM idle and is no wider than n."""
    fitting = [tile for tile in fitting_tiles(tiles, output) if tile.block_m == height]
    columns = [tile.block_n for tile in fitting]
    rounds = [tiles_m * ceil_div(n, width) / gpu.num_sms for width in columns]
    wide = [at for at, width in enumerate(columns) if rounds[at] > 0.75 and width < n + columns[0]]
    return fitting[max(wide, default=0)]


@cache
def fitting_tiles(tiles: tuple[Tile, ...], output: Output) -> tuple[Tile, ...]:
    """List the tiles whose store buffers fit."""
    return tuple(tile for tile in tiles if tile.config(output, K_MAJOR, 1).why_illegal() is None)


SUM_TILES = (
    Tile(64, 128),
    Tile(128, 128),
    Tile(128, 192, cluster_n=2),
    Tile(128, 256, cluster_m=2),
    Tile(192, 128, cluster_m=2),
)
"""Tiles for sums of several products."""
SUM_OUTPUT = replace(FP32, work=SUM)
SLICES_US_PER_MB = 0.64
"""Microseconds to write and read 1 MB of slices. Fitted on an H200: 16 to 512 products, D of 128x128 to 512x512."""
LEAST_SLICE_OF_SUM = 8
"""The least number of k-blocks in a slice: each slice costs writing and reading a D in FP32."""


def select_bf16_sum(m: int, n: int, blocks: int, majors: Majors) -> tuple[Bf16Config, int]:
    """Choose the configuration and the number of slices for a sum over products with `blocks` blocks of k in all.

    The number of slices, and so the bits, depends on sizes alone: each SM of an H100 gets one tile of a slice.
    """
    tile = min(SUM_TILES, key=lambda tile: _us_of_sum(tile, m, n, blocks))
    return tile.config(SUM_OUTPUT, majors, 1), _slices_of_sum(tile, m, n, blocks)


def _slices_of_sum(tile: Tile, m: int, n: int, blocks: int) -> int:
    return max(1, min(NUM_SMS // _tiles_with_neighbours(tile, m, n), blocks // LEAST_SLICE_OF_SUM))


def _tiles_with_neighbours(tile: Tile, m: int, n: int) -> int:
    """Count tiles of D, and the tiles outside D that complete clusters."""
    high, wide = tile.block_m * tile.cluster_m, tile.block_n * tile.cluster_n
    return ceil_div(m, high) * ceil_div(n, wide) * tile.cluster_m * tile.cluster_n


def _us_of_sum(tile: Tile, m: int, n: int, blocks: int) -> float:
    """Estimate microseconds: a CTA's k-blocks (operations and its own loads), and writing and reading all slices."""
    operations_us = 2 * tile.block_m * tile.block_n * BLOCK_K / SM_TFLOPS / 1e6
    loaded = tile.block_m // tile.cluster_n + tile.block_n // tile.cluster_m
    slices = _slices_of_sum(tile, m, n, blocks)
    rounds = ceil_div(_tiles_with_neighbours(tile, m, n) * slices, NUM_SMS)
    us_of_blocks = ceil_div(blocks, slices) * (operations_us + loaded * 128 / LOAD_KB_PER_US / 1e3)
    return rounds * us_of_blocks + slices * m * n * 4 / 1e6 * SLICES_US_PER_MB


def reachable_bf16_sum() -> list[Bf16Config]:
    """List every configuration that `select_bf16_sum` can return."""
    majors = (Majors(), Majors(b_is_mn=True), Majors(True, True), Majors(a_is_mn=True))
    return [tile.config(SUM_OUTPUT, each, 1) for each in majors for tile in SUM_TILES]


def reachable_bf16_rows() -> list[Bf16Config]:
    """List every configuration that `select_bf16_rows` can return."""
    outputs = [replace(OUTPUTS[i], work=work) for work in (IDS, ENDS, COUNTS) for i in (0, 2, 3, 5)]
    return [
        tile.config(output, Majors(b_is_mn=b_is_mn), 1)
        for output in (*outputs, ACTIVATED, TO_RANKS)
        for b_is_mn in (False, True)
        for tile in fitting_tiles(ROWS_TILES, output)
    ]


def reachable_bf16_depths() -> list[Bf16Config]:
    """List every configuration that `select_bf16_depths` can return."""
    outputs = [replace(each, work=work) for work in (PARTS, COUNTED) for each in OUTPUTS[:5]]
    return [
        tile.config(output, Majors(True, True), 1) for output in outputs for tile in fitting_tiles(DEPTHS_TILES, output)
    ]


def reachable_bf16() -> list[Bf16Config]:
    """List every configuration that `select_bf16` can return for one product."""
    found = [
        tile.config(output, majors, slices)
        for majors in (Majors(), Majors(b_is_mn=True), Majors(True, True), Majors(a_is_mn=True))
        for slices in (1, *SPLITS_AT_ONCE)
        if slices == 1 or not majors.a_is_mn
        for output in (*OUTPUTS, *([OF_SUMS] if slices == 1 and not majors.a_is_mn else []))
        for tile in TILES
        if tile.serves(majors, slices, output)
    ]
    return list(dict.fromkeys(found))
