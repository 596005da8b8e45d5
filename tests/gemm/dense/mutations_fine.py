"""Mistakes in the fp8_gemm kernel's code for scales of fewer than 128 columns, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.core.check.recipes import PER_64, PER_BLOCK, PER_ROW, Scales
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.dense import DenseTrial as Trial
from lab.sim.mutate import Mutation
from lab.sim.rows import RowsTrial

ROWS_32, BLOCKS_32, BLOCKS_64 = Scales(1, 32), Scales(32, 32), Scales(64, 64)


def config(sfa: Scales, sfb: Scales, block_m: int, groups: works.Work = works.DENSE, split: int = 1) -> GemmConfig:
    return tile_config(block_m, 128, Output(sfa=sfa, sfb=sfb, work=groups), cluster_k=split, k=128)


FOLDING = config(PER_ROW, BLOCKS_32, 128)
WIDE = config(PER_ROW, BLOCKS_64, 64)
TALL = config(PER_ROW, BLOCKS_32, 256)
SPLIT = config(PER_ROW, BLOCKS_32, 64, split=2)
SPLIT_64 = config(PER_ROW, BLOCKS_64, 64, split=2)
PARTS = config(ROWS_32, BLOCKS_32, 128)
MIXED = config(PER_64, BLOCKS_32, 64)
BY_ROW = config(ROWS_32, ROWS_32, 128)
MIXED_BY_ROW = config(PER_ROW, ROWS_32, 64)
BY_BLOCK = config(ROWS_32, PER_BLOCK, 64)
IDS = config(PER_ROW, BLOCKS_32, 64, works.IDS)
IDS_BY_ROW = config(ROWS_32, ROWS_32, 64, works.IDS)

TRIALS = [
    *(
        Trial(FOLDING, 137, 296, k, k, name, num_sms=1)
        for k, name in ((928, "slow_warps"), (1312, "late_loads"), (288, None))
    ),
    *(
        Trial(FOLDING, 77, 296, 1184, 4, name, num_sms=1)
        for name in ("slow_producer", "slow_math", "slow_lanes", "prompt_loads")
    ),
    Trial(WIDE, 77, 328, 2336, 5, "late_loads", num_sms=1),
    Trial(TALL, 260, 136, 544, 6, num_sms=1),
    Trial(SPLIT, 72, 200, 1312, 7, num_sms=2),
    Trial(FOLDING, 137, 296, 1312, 17, num_sms=1, any_scales=True, words=Words.B),
    Trial(SPLIT_64, 72, 200, 1696, 18, num_sms=2, words=Words.B),
    *(Trial(PARTS, 137, 296, k, 8, num_sms=1) for k in (416, 1056)),
    *(Trial(PARTS, 5, 296, 288, 9, name, num_sms=1) for name in ("slow_math", "late_loads")),
    Trial(MIXED, 70, 136, 800, 10, num_sms=1),
    *(Trial(BY_ROW, 137, 296, 672, seed, name, num_sms=1) for seed, name in ((11, "slow_warps"), (12, "late_loads"))),
    Trial(MIXED_BY_ROW, 70, 136, 416, 13, num_sms=1),
    Trial(BY_BLOCK, 70, 136, 416, 14, num_sms=1),
    *(
        RowsTrial(IDS, (0,) * 70 + (-1,) * 3 + (2,) * 66, 15, name, n=200, k=1184, num_sms=2)
        for name in (None, "slow_warps")
    ),
    RowsTrial(IDS_BY_ROW, (0,) * 70 + (-1,) * 3 + (2,) * 66, 16, n=200, k=288, num_sms=2),
]  # fmt: skip

_WRITE, _CHUNK, _ROW, _TILE = "convert/scales_of_blocks.cuh", "scales/by_chunk.cuh", "scales/by_row.cuh", "tile.cuh"
_LOOP, _GEMM, _OPERAND, _OF_TILE, _SLOT, _THREAD = (
    "mainloop.cuh",
    "fp8_gemm.cuh",
    "operand.cuh",
    "work/rows_of_tile.cuh",
    "slot.cuh",
    "scales/thread.cuh",
)
_ARRIVE = "if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&shared.ring.full[at.stage]);"

MUTATIONS = [
    # Written to a slot
    Mutation("the slot is full without its scales", _GEMM, "shared.ring.init(kFinishingWarps);", "shared.ring.init();"),
    Mutation("the warp that scales takes no tiles", "work/rows.cuh", "kConvertGroups * kConvertWarps + kScalingWarps);", "kConvertGroups * kConvertWarps);", shows_in=IDS),
    Mutation("scales overwrite those that are read", _WRITE, "        wait_until_free(shared.ring, at);\n", ""),
    Mutation("the slot is full before all lanes have written", _WRITE, f"        ptx::syncwarp();\n        {_ARRIVE}", f"        {_ARRIVE}"),
    Mutation("nobody says that scales are there", _WRITE, _ARRIVE, ""),
    Mutation("every lane says so", _WRITE, _ARRIVE, "ptx::mbarrier_arrive(&shared.ring.full[at.stage]);"),
    Mutation("scales of the first k-block of a batch", _WRITE, "if (block_of_lane == i) {", "if (block_of_lane == 0) {"),
    Mutation("a batch too long", _WRITE, "? k_blocks.end - first : kBlocksOfBatch;", "? kBlocksOfBatch : kBlocksOfBatch;"),
    Mutation("the same batch again", _WRITE, "scales.ask(p, first + kBlocksOfBatch);", "scales.ask(p, first);"),
    Mutation("scales of k-blocks before a split's", _WRITE, "scales.ask(p, k_blocks.first);", "scales.ask(p, 0);", shows_in=SPLIT),
    Mutation("scales behind the last one of k", _WRITE, "coming[i] = is_there ?", "coming[i] = true ?"),
    Mutation("the last scale of k is left out", _WRITE, "part < ceil_div(p.k, kBlockK / kScalePartsOfB);", "part + 1 < ceil_div(p.k, kBlockK / kScalePartsOfB);"),
    Mutation("scales of rows past the last", _WRITE, "(block < last ? block : last)", "(block)"),
    Mutation("the last block is left out", _WRITE, "const uint32_t last = (p.n - 1) / kScaleRowsOfB;", "const uint32_t last = p.n / kScaleRowsOfB - 1;"),
    Mutation("one chunk's scales for all", _WRITE, "tile.row_n / kScaleRowsOfB + i;", "tile.row_n / kScaleRowsOfB;"),
    Mutation("scales of the first tile", _WRITE, "tile.row_n / kScaleRowsOfB + i;", "i;"),
    Mutation("parts are written in one place", _WRITE, "&to[part * kChunks], current[0], current[1], current[2], current[3]", "&to[0], current[0], current[1], current[2], current[3]"),
    Mutation("two chunks' parts in one place", _WRITE, "&to[part * kChunks], current[0], current[1])", "&to[0], current[0], current[1])", shows_in=WIDE),
    Mutation("chunks in another order", _WRITE, "current[0], current[1], current[2], current[3]", "current[0], current[2], current[1], current[3]"),
    # Words
    Mutation("words are numbers", _WRITE, "are_words(p.words & kWordsOfB)", "are_words(false)"),
    Mutation("words of A are those of B", _WRITE, "are_words(p.words & kWordsOfB)", "are_words(p.words & kWordsOfA)"),
    Mutation("a word for each scale", _WRITE, "are_words ? part / 4 : part", "part"),
    Mutation("a word's first exponent for all", _WRITE, "bits_of_scale_at(part, coming[i])", "bits_of_scale_at(0, coming[i])"),
    Mutation("exponents from the split's first on", _WRITE, "scales.taken(i, first * kScalePartsOfB + ptx::lane_index())", "scales.taken(i, ptx::lane_index())", shows_in=SPLIT_64),
    # Folding
    Mutation("all fold", _WRITE, "(folding >> i * kScalePartsOfB & kAll) == kAll);", "1);"),
    Mutation("a k-block folds if one of its parts is as the first", _WRITE, "(folding >> i * kScalePartsOfB & kAll) == kAll);", "(folding >> i * kScalePartsOfB & kAll) != 0);"),
    Mutation("the first k-block says whether all of a batch fold", _WRITE, "(folding >> i * kScalePartsOfB & kAll)", "(folding & kAll)"),
    Mutation("the last chunk says whether all fold", _WRITE, "folds &= current[i]", "folds = current[i]"),
    Mutation("the flag of the slot before", _CHUNK, "in_first_slot.sfb + stage * kScales + kScalesWritten - 1)", "in_first_slot.sfb + kScalesWritten - 1)"),
    Mutation("a scale for a flag", _CHUNK, "kScalesWritten - 1)", "kScalesWritten - 2)"),
    Mutation("the flag is read before the slot is full", _LOOP, "      if (!is_loaded) wait_until_loaded(ring, at);\n      is_loaded = true;\n", ""),
    Mutation("what folds is multiplied in parts too", _LOOP, "        continue;\n      }\n    }\n    multiply_k_blocks", "      }\n    }\n    multiply_k_blocks"),
    # Read from a slot
    Mutation("B's scales of the first part", _CHUNK, "scale_of_part(part, kScalePartsOfB) * kChunks;", "0;"),
    Mutation("A's scales of the first part", _CHUNK, "scale_of_part(part, kScaleParts) * kScaleRows + ", "", shows_in=PARTS),
    Mutation("B's scales of the first slot", _CHUNK, "in_first_slot.sfb + stage * kScales + scale_of_part", "in_first_slot.sfb + scale_of_part"),
    Mutation("A's scales of the first unit", _CHUNK, " + row_of_unit(unit), rows);", ", rows);", shows_in=TALL),
    Mutation("two chunks have one scale", _CHUNK, "chunks[1] = four.y", "chunks[1] = four.x"),
    Mutation("the slot is let go behind its first part", _CHUNK, "if (piece + 1 == kPieces) release_slot", "if (piece == 0) release_slot"),
    Mutation("chunks half as wide", _CHUNK, "kValues = kScaleRowsOfB / 2;", "kValues = kScaleRowsOfB / 4;"),
    Mutation("scales for one another's rows", _CHUNK, "scale[i / 2 % 2]", "scale[1 - i / 2 % 2]"),
    Mutation("A has as many scales as B", _TILE, "return part * scales / kParts;", "return part;"),
    Mutation("parts of rows by the first scale of B", _ROW, "scale_of_part(part_of_piece<kOfUnit>(piece), kScalePartsOfB) * kBlockN;", "0;", shows_in=BY_ROW),
    Mutation("parts of rows by the first scale of A", _ROW, "scale_of_part(part_of_piece<kOfUnit>(piece), kScaleParts) * kScaleRows;", "0;", shows_in=BY_ROW),
    Mutation("a row's slot is let go behind its first part", _ROW, "if (piece + 1 == kPieces) {", "if (piece == 0) {", shows_in=BY_ROW),
    # Loaded by TMA
    Mutation("scales of A of the k-block's number", _OPERAND, "tile.row_m, k_block * kScaleParts,", "tile.row_m, k_block,", shows_in=PARTS),
    Mutation("scales of B of the k-block's number", _OPERAND, "tile.row_n, k_block * kScalePartsOfB,", "tile.row_n, k_block,", shows_in=BY_ROW),
    Mutation("scales of B of the k-block's number, by groups", _OF_TILE, "k_block * kScalePartsOfB, tile.group);", "k_block, tile.group);", shows_in=IDS_BY_ROW),
    Mutation("B's scales land upon A's", _OPERAND, "slot.scales + kScaleParts * kScaleRows, tile.row_n", "slot.scales + kScaleRows, tile.row_n", shows_in=BY_ROW),
    Mutation("B's scales are read among A's", _THREAD, "first_scales + kScaleParts * kScaleRows +", "first_scales + kScaleRows +", shows_in=PARTS),
    Mutation("fewer scales are expected", _OPERAND, "kHasScales && kScaleParts == 1 && p.m < kBlockM", "kHasScales && p.m < kBlockM", shows_in=PARTS),
    Mutation("one part's scales of B are expected", _SLOT, "+ kScalesLoaded * 4;", "+ (kScalesLoaded - (kParts - 1) * kBlockN) * 4;", shows_in=BY_ROW),
]  # fmt: skip
