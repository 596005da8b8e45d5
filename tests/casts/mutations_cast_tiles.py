"""Mistakes in the cast_tiles kernel, and the trials that must notice them. The list of cast_rows breaks shared code.

Some matrices have tiles of ordinary blocks alone, some have tiles of other blocks, and some have both.
"""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_tiles import Grain, tile_cast_config
from lab.sim.cast_tiles import TileTrial as Trial
from lab.sim.cast_tiles import TurnedTrial
from lab.sim.mutate import Mutation

BOTH, BOTH_FP32 = (
    tile_cast_config(dtype, Grain.ROWS, with_columns=True, is_aligned=True) for dtype in (torch.bfloat16, torch.float32)
)
BOTH_SINGLE = tile_cast_config(
    torch.bfloat16, Grain.ROWS, with_columns=True, is_aligned=False, has_aligned_columns=False
)
COLUMNS = tile_cast_config(torch.float16, None, with_columns=True, is_aligned=True, has_aligned_columns=False)
COLUMNS_SINGLE_FP32 = tile_cast_config(torch.float32, None, with_columns=True, is_aligned=False)
CHANNELS = tile_cast_config(torch.bfloat16, Grain.CHANNELS, with_columns=False, is_aligned=True)
CHANNELS_SINGLE = tile_cast_config(torch.bfloat16, Grain.CHANNELS, with_columns=False, is_aligned=False)
BLOCKS = tile_cast_config(torch.bfloat16, Grain.BLOCKS, with_columns=False, is_aligned=True)

TURNED = tile_cast_config(torch.bfloat16, Grain.BLOCKS, with_columns=True, is_aligned=True)

TRIALS = [
    Trial(BOTH, (176, 264), 1),
    Trial(BOTH, (144, 136), 2, "slow_warps", padding=16),
    Trial(BOTH, (144, 136), 3, "slow_lanes", is_m_major=False, rounds_up=True),
    Trial(BOTH_FP32, (272, 140), 4, padding=16),
    *(Trial(BOTH_FP32, (144, 132), seed, "slow_warps") for seed in (5, 6)),
    Trial(BOTH_SINGLE, (131, 133), 7),
    Trial(COLUMNS, (203, 136), 8, padding=3),
    Trial(COLUMNS, (203, 136), 9, "slow_warps"),
    Trial(COLUMNS_SINGLE_FP32, (144, 131), 10, padding=16),
    Trial(COLUMNS, (203, 136), 22, padding=3, is_whole=True),
    Trial(CHANNELS, (203, 264), 11),
    *(Trial(CHANNELS, (203, 136), seed, "slow_warps", is_m_major=False) for seed in (12, 13)),
    Trial(CHANNELS_SINGLE, (131, 133), 14, padding=5),
    Trial(BLOCKS, (331, 264), 15, padding=8),
    Trial(BLOCKS, (512, 520), 18),
    *(Trial(BLOCKS, (203, 136), seed, "slow_warps", is_m_major=False) for seed in (16, 17)),
    TurnedTrial(TURNED, (3, 144, 136), 19),
    TurnedTrial(TURNED, (2, 144, 136), 20, "slow_warps", rounds_up=True),
    TurnedTrial(TURNED, (3, 144, 264), 21, both_ways=True),
]

_TILES, _KERNEL, _VALUES = "cast/tile.cuh", "cast_tiles.cuh", "cast/values.cuh"
_FIRST_BARRIER = "store_warp_keys<kIsOrdinary>(shared, tile);\n  ptx::syncthreads();\n"

MUTATIONS = [
    # Scales of whole columns
    Mutation("tiles have scales of their own", _TILES, "if (p.column_amaxes != nullptr", "if (false"),
    Mutation("columns have the first tile's scales", _TILES, "p.column_amaxes + tile.column + at.column", "p.column_amaxes + at.column"),
    # The tile
    Mutation("tiles of a row rounded down", _KERNEL, "ptx::block_index(), ceil_div(p.k, kBlock), p.block_reciprocal", "ptx::block_index(), p.k / kBlock, p.block_reciprocal"),
    Mutation("columns of tiles rounded down", _TILES, "column = tile.block * kBlock;", "column = tile.block * (kBlock / 2);"),
    Mutation("rows and columns of tiles exchanged", _TILES, "row = tile.row * kBlock, column = tile.block * kBlock;", "row = tile.block * kBlock, column = tile.row * kBlock;"),
    Mutation("teams take rows in turns", _TILES, "return team * kTeamRows + i;", "return i * kTeams + team;"),
    Mutation("rows of x lie as far apart as they are long", _KERNEL, "uint64_t{x_row} * p.x_pitch", "uint64_t{x_row} * p.k * kInputBytes"),
    Mutation("rows past the last count", _KERNEL, "x_row < p.m, tile.column", "true, tile.column"),
    Mutation("single columns past the last count", _VALUES, "if (!is_there || column >= end) continue;", "if (!is_there) continue;", shows_in=BOTH_SINGLE),
    # Scales
    Mutation("a column's keys of a team's last row", _TILES, "for (const Piece& piece : tile.pieces) keys[word] = larger_key(keys[word], key_of<kIsOrdinary>(piece.words[word]));", "for (const Piece& piece : tile.pieces) keys[word] = key_of<kIsOrdinary>(piece.words[word]);"),
    Mutation("a column's keys of the last team", _TILES, "key = larger_key(key, ptx::ld_shared_b32(&shared.column_keys", "key = larger_key(0, ptx::ld_shared_b32(&shared.column_keys"),
    Mutation("all keys of a lane at the same place", _TILES, "kVector == 1 ? word * kLanes + lane", "kVector == 1 ? lane", shows_in=BOTH_SINGLE),
    Mutation("keys of a lane at the next lane's places", _TILES, ": lane * kWords + word;", ": lane * kWords + word + 1;"),
    Mutation("a column's keys among the lane's of another", _TILES, "kVector == 1 ? column % kLanes : column / kVector;", "kVector == 1 ? column / kWords : column / kVector;", shows_in=BOTH_SINGLE),
    Mutation("a column's element of another", _TILES, "kVector == 1 ? column / kLanes : column % kVector;", "kVector == 1 ? column % kWords : column % kVector;", shows_in=BOTH_SINGLE),
    Mutation("the last team's keys left out", _TILES, "i < kTeams / kParts; ++i", "i + 1 < kTeams / kParts; ++i"),
    Mutation("columns' scales at other lanes' places", _TILES, "[index_of(at.column)][lane_of(at.column)]", "[index_of(at.column)][lane_of(at.column) ^ 1]"),
    Mutation("both columns of a word have the first's scale", _TILES, "element % kElementsOfWord == 0 ? amaxes.x : amaxes.y;", "amaxes.x;"),
    Mutation("rows' scales at the first team's places", _TILES, "&shared.of_rows[tile.row_of(tile.lane)]", "&shared.of_rows[tile.lane]"),
    Mutation("half of a team's rows have scales", _TILES, "if (tile.lane < kTeamRows)", "if (tile.lane < kTeamRows / 2)"),
    Mutation("half of a warp counts for a block", _TILES, "distance < 32; distance *= 2", "distance < 16; distance *= 2", shows_in=BLOCKS),
    Mutation("a team counts for a block", _TILES, "for (const Piece& piece : tile.pieces) key = larger_key(key, key_of_block<kIsOrdinary>(piece, i));", "key = key_of_block<kIsOrdinary>(tile.pieces[0], i);", shows_in=BLOCKS),
    Mutation("the last warp does not count for a block", _TILES, "warp < kWarpsOfPart; ++warp", "warp + 1 < kWarpsOfPart; ++warp", shows_in=BLOCKS),
    Mutation("all warps at the first one's place", _TILES, "shared.warp_keys[ptx::thread_index() / 32]", "shared.warp_keys[0]", shows_in=BLOCKS),
    Mutation("the strides of the blocks' scales exchanged", _TILES, "p.scales, tile.row / kBlock, p.scales_stride_m, tile.column / kBlock, p.scales_stride_k", "p.scales, tile.row / kBlock, p.scales_stride_k, tile.column / kBlock, p.scales_stride_m", shows_in=BLOCKS),
    Mutation("the strides of the rows' scales exchanged", _TILES, "scale_at(p.scales, tile.row + row, p.scales_stride_m, block_k, p.scales_stride_k)", "scale_at(p.scales, tile.row + row, p.scales_stride_k, block_k, p.scales_stride_m)"),
    Mutation("the strides of the columns' scales exchanged", _TILES, "scale_at(p.column_scales, part, p.column_scales_stride_m, column, p.column_scales_stride_k)", "scale_at(p.column_scales, part, p.column_scales_stride_k, column, p.column_scales_stride_m)"),
    Mutation("the strides of the channels' scales exchanged", _TILES, "scale_at(p.scales, part, p.scales_stride_m, column, p.scales_stride_k)", "scale_at(p.scales, part, p.scales_stride_k, column, p.scales_stride_m)", shows_in=CHANNELS),
    Mutation("scales of columns past the last are stored", _TILES, "at.is_there() && column < p.k &&", "at.is_there() &&"),
    Mutation("scales of rows past the last are stored", _TILES, "if (thread >= kBlock && tile.row + row < p.m)", "if (thread >= kBlock)"),
    Mutation("the first half of the rows' scales", _TILES, "const uint32_t row = thread - kBlock;", "const uint32_t row = (thread - kBlock) / 2;"),
    # Order
    Mutation("x is loaded before the kernel ahead has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("keys are read before all are there", _TILES, _FIRST_BARRIER, _FIRST_BARRIER.replace("  ptx::syncthreads();\n", "")),
    Mutation("columns' scales are read before all are there", _TILES, "if (!kCastsBlocks && !ptx::syncthreads_and(all_ordinary) && kIsOrdinary) return false;", "if (!all_ordinary && kIsOrdinary) return false;"),
    Mutation("columns' scales are read before all are there, and all are ordinary", _TILES, "if (!kCastsBlocks && !ptx::syncthreads_and(all_ordinary) && kIsOrdinary) return false;", ""),
    Mutation("columns are stored before all are there", _TILES, "    ptx::syncthreads();\n    store_columns(", "    store_columns("),
    Mutation("keys are written anew before all are read", _TILES, "    ptx::syncthreads();  // the keys have been read\n", ""),
    # Code for ordinary tiles, and code for any tiles
    Mutation("other tiles are left out", _TILES, "    cast_tile<false, kRowsToo>(shared, p, tile);", "    ;"),
    Mutation("other tiles are tried as ordinary ones again", _TILES, "    cast_tile<false, kRowsToo>(shared", "    cast_tile<true, kRowsToo>(shared"),
    Mutation("every tile under one scale counts as ordinary", _TILES, "kParts == 1 ? is_ordinary(divisors[0])", "kParts == 1 ? true", shows_in=BLOCKS),
    Mutation("other tiles' blocks are not cast", _TILES, "if (kIsOrdinary && !(kParts", "if (!(kParts", shows_in=BLOCKS),
    Mutation("other tiles' columns are not cast", _TILES, "ptx::syncthreads_and(all_ordinary) && kIsOrdinary", "ptx::syncthreads_and(all_ordinary)"),
    Mutation("rows need not be ordinary", _TILES, "if constexpr (kRowsToo) all_ordinary = store_row_divisors", "if constexpr (kRowsToo) store_row_divisors"),
    Mutation("columns need not be ordinary", _TILES, "    all_ordinary = all_ordinary && is_ordinary(of_first);\n", ""),
    # Values
    Mutation("values past the last row are stored", _TILES, "if (row < p.m) store_values", "store_values"),
    Mutation("values lie as far apart as x", _TILES, "uint64_t{row} * p.values_pitch, tile.column", "uint64_t{row} * p.x_pitch, tile.column"),
    Mutation("all rows of a team by the first one's scale", _TILES, "&shared.of_rows[tile.row_of(i)]", "&shared.of_rows[tile.row_of(0)]"),
    Mutation("all channels of a lane by the first one's scale", _TILES, "return divisors[e];", "return divisors[0];", shows_in=CHANNELS),
    # Transposed values
    Mutation("columns by the next one's scale", _TILES, "{ return load_divisor(&shared.of_columns[tile.part()][e][tile.lane]); }", "{ return load_divisor(&shared.of_columns[tile.part()][e ^ 1][tile.lane]); }"),
    Mutation("rows of a column exchanged", _TILES, "element_of(tile.pieces[i + j], e)", "element_of(tile.pieces[i + (j ^ 1)], e)"),
    Mutation("bytes written without a swizzle", _TILES, "(tile.team ^ swizzle_of(column)) * kTeamRows", "tile.team * kTeamRows"),
    Mutation("16 bytes read without a swizzle", _TILES, "(i ^ swizzle / 2) * 16", "i * 16"),
    Mutation("16 bytes in FP32 read without a swizzle", _TILES, "(i ^ swizzle) * 16", "i * 16", shows_in=BOTH_FP32),
    Mutation("chunks of 8 are not exchanged", _TILES, "swizzle % 2 == 0 ? v : ptx::Uint4{v.z, v.w, v.x, v.y}", "v"),
    Mutation("a single byte read without a swizzle", _TILES, "(row / kTeamRows ^ swizzle_of(column)) * kTeamRows", "row / kTeamRows * kTeamRows", shows_in=COLUMNS),
    Mutation("a single byte of another row", _TILES, ">> row % 4 * 8", ">> 0", shows_in=COLUMNS),
    Mutation("a single byte of the chunk's first word", _TILES, "chunk + row % kTeamRows / 4 * 4", "chunk", shows_in=COLUMNS),
    Mutation("half of the columns", _TILES, "i < kBlock * kChunks; i += kNumThreads", "i < kBlock * kChunks / 2; i += kNumThreads"),
    Mutation("columns past the last are stored", _TILES, "tile.column + column >= p.k || ", ""),
    Mutation("rows of columns past the last are stored", _TILES, " || tile.row + row >= p.m", ""),
    Mutation("columns lie as far apart as they are long", _TILES, "uint64_t{tile.column + column} * p.columns_pitch", "uint64_t{tile.column + column} * p.m"),
    Mutation("columns of the first tile of rows", _TILES, "p.columns_pitch + tile.row + row;", "p.columns_pitch + row;"),
    # Blocks of matrices that are transposed
    Mutation("all matrices are the first", _KERNEL, "found.x += uint64_t{matrix} * p.m * p.x_pitch;", "", shows_in=TURNED),
    Mutation("matrices lie as far apart as a row", _KERNEL, "uint64_t{matrix} * p.m * p.x_pitch", "uint64_t{matrix} * p.x_pitch", shows_in=TURNED),
    Mutation("columns of all matrices go to the first's", _KERNEL, "found.columns += uint64_t{matrix} * p.k * p.columns_pitch;", "", shows_in=TURNED),
    Mutation("scales of all matrices go to the first's", _KERNEL, "found.scales += uint64_t{matrix} * tiles_m * p.scales_stride_m;", "", shows_in=TURNED),
    Mutation("tiles of all matrices are counted on", _KERNEL, "tile.row -= matrix * tiles_m;", "", shows_in=TURNED),
    Mutation("matrices have tiles of whole rows alone", _KERNEL, "tiles_m = ceil_div(p.m, kBlock)", "tiles_m = p.m / kBlock", shows_in=TURNED),
    Mutation("blocks are not transposed", _TILES, "if constexpr (kTurnsBlocks) transpose<kIsOrdinary>(shared, tile, divisor_of_element);", "", shows_in=TURNED),
    Mutation("blocks are transposed alone", _TILES, "!kTurnsBlocks || p.values != nullptr", "!kTurnsBlocks", shows_in=TURNED),
    Mutation("blocks are not transposed alone", _TILES, "!kTurnsBlocks || p.values != nullptr", "true", shows_in=TURNED),
    Mutation("values of all matrices go to the first's", _KERNEL, "found.values += uint64_t{matrix} * p.m * p.values_pitch;", "", shows_in=TURNED),
]  # fmt: skip
