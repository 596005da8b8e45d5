"""Mistakes in casts to words, or with scales of under 128 rows or columns, and the trials that must notice them."""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_rows import Groups, cast_config
from deep_gemm.casts.cast_tiles import Grain, tile_cast_config
from deep_gemm.casts.rules import Target
from lab.sim.cast_rows import RowTrial
from lab.sim.cast_tiles import TileTrial
from lab.sim.mutate import Mutation

TO_WORDS = Target(columns=32, packs=True)
WORDS, WORDS_SINGLE = (cast_config(torch.bfloat16, is_aligned, False, to=TO_WORDS) for is_aligned in (True, False))
OF_GROUPS = cast_config(torch.bfloat16, True, False, groups=Groups.COUNTS, to=Target(columns=32))
ROWS_TRIALS = [
    RowTrial(WORDS, 35, 264, 1, rounds_up=True),
    RowTrial(WORDS, 35, 416, 2, "slow_warps", rounds_up=True, is_m_major=False),
    RowTrial(WORDS_SINGLE, 9, 133, 3, rounds_up=True, padding=3),
    RowTrial(OF_GROUPS, 36, 264, 4, sizes=(12, 0, 7)),
]

_WORDS = "cast/scales_words.cuh"
ROWS_MUTATIONS = [
    Mutation("strides of words exchanged", _WORDS, "row, p.scales_stride_m, block / kScalesOfWord, p.scales_stride_k", "row, p.scales_stride_k, block / kScalesOfWord, p.scales_stride_m"),
    Mutation("a word for each scale", _WORDS, "p.scales_stride_m, block / kScalesOfWord,", "p.scales_stride_m, block,"),
    Mutation("all scales of a word in its first byte", _WORDS, "st_global_b8(word + block % kScalesOfWord", "st_global_b8(word"),
    Mutation("the last scale of a word in its first byte", _WORDS, "st_global_b8(word + block % kScalesOfWord", "st_global_b8(word + 3 - block % kScalesOfWord"),
    Mutation("a bit of the mantissa is stored", _WORDS, ">> 23", ">> 22"),
    Mutation("every block fills up its word", _WORDS, "  if (block + 1 < ceil_div(p.k, kBlock)) return;\n", ""),
    Mutation("no block fills up its word", _WORDS, "if (block + 1 < ceil_div(p.k, kBlock)) return;", "return;"),
    Mutation("the last byte of a word is left", _WORDS, "i < kScalesOfWord; ++i", "i + 1 < kScalesOfWord; ++i"),
    Mutation("a word is filled up from its last scale", _WORDS, "i = block % kScalesOfWord + 1;", "i = block % kScalesOfWord;"),
]  # fmt: skip

BLOCKS, BLOCKS_64, BLOCKS_FP32 = (
    tile_cast_config(dtype, Grain.BLOCKS, with_columns=False, is_aligned=True, block=block)
    for dtype, block in ((torch.bfloat16, 32), (torch.bfloat16, 64), (torch.float32, 32))
)
SINGLE, SINGLE_64 = (
    tile_cast_config(torch.bfloat16, Grain.BLOCKS, with_columns=False, is_aligned=False, block=n) for n in (32, 64)
)
CHANNELS = tile_cast_config(torch.bfloat16, Grain.CHANNELS, with_columns=False, is_aligned=True, block=32)
COLUMNS = tile_cast_config(torch.bfloat16, None, with_columns=True, is_aligned=True, block=32)
COLUMNS_64 = tile_cast_config(torch.float32, None, with_columns=True, is_aligned=True, block=64)
TILES_TRIALS = [
    *(TileTrial(BLOCKS, (203, 264), seed, rounds_up=seed == 1) for seed in (1, 2)),
    TileTrial(BLOCKS, (203, 136), 3, "slow_warps", is_m_major=False),
    TileTrial(BLOCKS_64, (203, 264), 4, "slow_warps"),
    TileTrial(BLOCKS_FP32, (144, 140), 5),
    TileTrial(SINGLE, (131, 133), 6, padding=5),
    TileTrial(SINGLE_64, (131, 133), 7),
    TileTrial(CHANNELS, (203, 264), 8),
    TileTrial(CHANNELS, (203, 136), 9, "slow_warps", is_m_major=False),
    TileTrial(CHANNELS, (1, 1032), 12),
    TileTrial(SINGLE, (1, 1033), 13),
    TileTrial(COLUMNS, (176, 264), 10),
    TileTrial(COLUMNS_64, (144, 136), 11, "slow_warps"),
]

_TILES = "cast/tile.cuh"
TILES_MUTATIONS = [
    # Parts of a tile's rows
    Mutation("all rows are of the first part", _TILES, "return kParts == 1 ? 0 : team * kTeamRows / kScaleBlock;", "return 0;"),
    Mutation("keys of the first part for all", _TILES, "shared.column_keys[part * (kTeams / kParts) + i]", "shared.column_keys[i]", shows_in=CHANNELS),
    Mutation("keys of parts that overlap", _TILES, "shared.column_keys[part * (kTeams / kParts) + i]", "shared.column_keys[part + i]", shows_in=CHANNELS),
    Mutation("a part of a column's scales at another's place", _TILES, "column(i / kParts), part(i % kParts)", "column(i / kParts), part(0)", shows_in=CHANNELS),
    Mutation("columns' scales of the first part", _TILES, "&shared.of_columns[at.part][index_of", "&shared.of_columns[0][index_of", shows_in=CHANNELS),
    Mutation("values by the first part's scales", _TILES, "{ return load_divisor(&shared.of_columns[tile.part()]", "{ return load_divisor(&shared.of_columns[0]", shows_in=COLUMNS),
    Mutation("channels by the first part's scales", _TILES, "divisors[e] = load_divisor(&shared.of_columns[tile.part()]", "divisors[e] = load_divisor(&shared.of_columns[0]", shows_in=CHANNELS),
    Mutation("the second scales of threads are those of their first", _TILES, "second(thread + kNumThreads)", "second(thread)", shows_in=CHANNELS),
    Mutation("second scales need not be ordinary", _TILES, "    all_ordinary = all_ordinary && is_ordinary(of_second);\n", "", shows_in=CHANNELS),
    Mutation("second scales are not stored", _TILES, "    if constexpr (kColumnScales == 2) store_column_scale(p, tile, block_m, second, of_second.scale);\n", "", shows_in=CHANNELS),
    Mutation("scales of parts as far apart as tiles", _TILES, "part = block_m * kParts + at.part;", "part = block_m + at.part;", shows_in=CHANNELS),
    Mutation("scales of parts past the last row are stored", _TILES, " && (kParts == 1 || part * kScaleBlock < p.m)", "", shows_in=CHANNELS),
    # Blocks
    Mutation("a lane's elements are all of one block", _TILES, "for (uint32_t e = i * kEach; e < (i + 1) * kEach; ++e) {", "for (uint32_t e = 0; e < kElements; ++e) {", shows_in=SINGLE),
    Mutation("both elements of a word count for a block", _TILES, ">> e % 2 * 16 & 0xffff", "", shows_in=SINGLE),
    Mutation("the first element of a word counts for both blocks", _TILES, ">> e % 2 * 16 & 0xffff", "& 0xffff", shows_in=SINGLE),
    Mutation("lanes' blocks are all the first", _TILES, "return kBlocksOfLane == kParts ? i : tile.lane / kLanesOfBlock;", "return 0;", shows_in=BLOCKS),
    Mutation("the first lane alone stands for blocks", _TILES, "return kBlocksOfLane * kLanesOfBlock < kLanes ? ptx::lane_index() % kLanesOfBlock == 0 && ptx::lane_index() < kLanes", "return kBlocksOfLane * kLanesOfBlock < kLanes ? ptx::lane_index() == 0", shows_in=BLOCKS),
    Mutation("the first team counts for a block", _TILES, "if (distance < kLanesOfBlock || distance >= kLanes)", "if (distance < kLanesOfBlock)", shows_in=BLOCKS),
    Mutation("lanes of other blocks count", _TILES, "if (distance < kLanesOfBlock || distance >= kLanes)", "", shows_in=BLOCKS),
    Mutation("warps of the first part for all", _TILES, "shared.warp_keys[tile.part() * kWarpsOfPart + warp]", "shared.warp_keys[warp]", shows_in=BLOCKS),
    Mutation("the first warp counts for a part", _TILES, "warp < kWarpsOfPart; ++warp", "warp < 1; ++warp", shows_in=BLOCKS),
    Mutation("blocks are taken for ordinary by each thread alone", _TILES, "(kParts == 1 ? is_ordinary(divisors[0]) : ptx::syncthreads_and(all_ordinary))", "all_ordinary", shows_in=BLOCKS),
    Mutation("a lane's first block decides", _TILES, "all_ordinary = all_ordinary && is_ordinary(divisors[i]);", "all_ordinary = is_ordinary(divisors[0]);", shows_in=SINGLE),
    Mutation("a lane's blocks by the first one's scale", _TILES, "return divisors[e / (kElements / kBlocksOfLane)];", "return divisors[0];", shows_in=SINGLE),
    Mutation("scales of blocks of rows as far apart as tiles", _TILES, "row = tile.row / kScaleBlock + tile.part()", "row = tile.row / kBlock + tile.part()", shows_in=BLOCKS),
    Mutation("scales of blocks of columns as far apart as tiles", _TILES, "column = tile.column / kScaleBlock + block_of(tile, i)", "column = tile.column / kBlock + block_of(tile, i)", shows_in=BLOCKS),
    Mutation("scales of blocks past the last row are stored", _TILES, " && row * kScaleBlock < p.m &&", " &&", shows_in=BLOCKS),
    Mutation("scales of blocks past the last column are stored", _TILES, " &&\n          column * kScaleBlock < p.k)", ")", shows_in=BLOCKS),
    Mutation("the strides of fine blocks' scales exchanged", _TILES, "scale_at(p.scales, row, p.scales_stride_m, column, p.scales_stride_k)", "scale_at(p.scales, row, p.scales_stride_k, column, p.scales_stride_m)", shows_in=BLOCKS),
    Mutation("the second warp of a part stores its scales", _TILES, "% kWarpsOfPart == 0 && row", "% kWarpsOfPart == 9 && row", shows_in=BLOCKS),
]  # fmt: skip
