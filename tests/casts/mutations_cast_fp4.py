"""Ways to break casts of rows to FP4, and the trials that must notice. Code shared with FP8 has a list of its own."""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_rows import cast_config
from deep_gemm.casts.rules import FP4, Target
from deep_gemm.casts.rules import MXFP4 as OF_MX
from lab.sim.cast_rows import RowTrial, hard
from lab.sim.mutate import Mutation

BF16, BF16_BY_128, FP32 = (
    cast_config(dtype, is_aligned=True, is_few=False, to=Target(columns=block, format=FP4))
    for dtype, block in ((torch.bfloat16, 32), (torch.bfloat16, 128), (torch.float32, 32))
)
MXFP4 = cast_config(torch.bfloat16, is_aligned=True, is_few=False, to=Target(columns=32, format=OF_MX))
SINGLE = cast_config(torch.bfloat16, is_aligned=False, is_few=True, to=Target(columns=32, format=FP4))
HARD_ROWS = len(hard(FP32))

TRIALS = [
    RowTrial(BF16, 35, 264, 1),
    RowTrial(BF16, 35, 264, 2, "slow_warps", data="mixed", rounds_up=True),
    RowTrial(BF16_BY_128, 19, 392, 3, "slow_lanes"),
    RowTrial(FP32, HARD_ROWS, 32, data="hard"),
    RowTrial(FP32, 35, 260, 4, data="ordinary"),
    RowTrial(MXFP4, 35, 264, 6, rounds_up=True, data="mixed"),
    RowTrial(SINGLE, 6, 262, 5, "slow_lanes", padding=3),
]

_E2M1, _BLOCK = "cast/e2m1.cuh", "cast/team_of_block.cuh"
MUTATIONS = [
    # Scales
    Mutation("scales of FP8", _BLOCK, "p.rounds_up, kLargestValue)", "p.rounds_up)"),
    Mutation("the largest must fit in MXFP4", _E2M1, "kCutsLargest ? 7.f", "kCutsLargest ? 6.f", shows_in=MXFP4),
    Mutation("the largest is twice too large in MXFP4", _E2M1, "kCutsLargest ? 7.f", "kCutsLargest ? 8.f", shows_in=MXFP4),
    Mutation("no block is marked", _BLOCK, "scale = ptx::float_of(kNan)", ""),
    Mutation("every block that is not ordinary is marked", _BLOCK, "(ptx::bits_of(amax_of(largest_of_team(keys, lane))) >= kInfinity)", "(true)"),
    Mutation("infinities do not mark a block", _BLOCK, "(keys, lane))) >= kInfinity", "(keys, lane))) > kInfinity"),
    Mutation("infinities never count", "cast/values.cuh", "  if constexpr (kIsOrdinary) return key;\n", ""),
    Mutation("NaN do not mark a block", "cast/values.cuh", "else if constexpr (kMarksBlocks)", "else if constexpr (false)"),
    Mutation("a team's first row marks all", _BLOCK, "key_of<true>(held[i])", "key_of<true>(held[0])"),
    # The nearest number
    Mutation("numbers above 6 become 8", _E2M1, "ptx::abs_f32(ptx::min_magnitude(quotient, kLargestOfE2m1))", "ptx::abs_f32(quotient)", shows_in=MXFP4),
    Mutation("the largest is cut off", _E2M1, "kLargestOfE2m1 = 6.f", "kLargestOfE2m1 = 4.f"),
    Mutation("numbers below 1 lie closer", _E2M1, "ptx::max_f32(magnitude, 1.f)", "magnitude"),
    Mutation("numbers below 2 lie further apart", _E2M1, "ptx::max_f32(magnitude, 1.f)", "ptx::max_f32(magnitude, 2.f)"),
    Mutation("the number itself for a power of two", _E2M1, "ptx::max_f32(magnitude, 1.f)) & 0x7f800000", "ptx::max_f32(magnitude, 1.f))"),
    Mutation("half the distance", _E2M1, "power * 0x1p22f", "power * 0x1p21f"),
    Mutation("twice the distance", _E2M1, "power * 0x1p22f", "power * 0x1p23f"),
    Mutation("not rounded", _E2M1, "const float nearest = (magnitude + away) - away;", "const float nearest = magnitude;"),
    Mutation("signs are lost", _E2M1, " | (ptx::bits_of(quotient) & 0x80000000)", ""),
    Mutation("numbers as they are", _E2M1, "nearest * 0x1p-6f", "nearest"),
    # Codes
    Mutation("magnitudes one bit higher", _E2M1, "bytes >> 2 & 0x07070707", "bytes >> 1 & 0x07070707"),
    Mutation("the bits beside are kept", _E2M1, "bytes >> 2 & 0x07070707", "bytes >> 2 & 0x0f0f0f0f"),
    Mutation("signs stay in their place", _E2M1, "bytes >> 4 & 0x08080808", "bytes & 0x80808080"),
    Mutation("the upper half is the lane's own", _E2M1, "{first | ptx::shfl_sync(first, ptx::lane_index() ^ 1) << 4}", "{first | first << 4}", shows_in=SINGLE),
    Mutation("halves exchanged between lanes", _E2M1, "{first | ptx::shfl_sync(first, ptx::lane_index() ^ 1) << 4}", "{first << 4 | ptx::shfl_sync(first, ptx::lane_index() ^ 1)}", shows_in=SINGLE),
    Mutation("the other half comes from further away", _E2M1, "ptx::lane_index() ^ 1) << 4", "ptx::lane_index() ^ 2) << 4", shows_in=SINGLE),
    Mutation("the first four alone", _E2M1, "if constexpr (kElements == 8) second = codes_of", "if constexpr (false) second = codes_of"),
    Mutation("the first four twice", _E2M1, "codes_of(v[4], v[5], v[6], v[7])", "codes_of(v[0], v[1], v[2], v[3])"),
    Mutation("halves of the second four exchanged", _E2M1, "second | second >> 4", "second << 4 | second"),
    Mutation("the second four first", _E2M1, "0x6420", "0x2064"),
    # Stores
    Mutation("odd lanes store too", _E2M1, "if (ptx::lane_index() % 2 == 0) ptx", "ptx", shows_in=SINGLE),
    Mutation("a lane's first byte four times", _E2M1, "word >> i * 8", "word", shows_in=SINGLE),
    Mutation("single values a byte apart", _E2M1, "st_global_b8(row + column / 2", "st_global_b8(row + column", shows_in=SINGLE),
    Mutation("words a byte for each column apart", _E2M1, "st_global_b32(row + column / 2", "st_global_b32(row + column"),
    Mutation("half words a byte for each column apart", _E2M1, "st_global_b16(row + column / 2", "st_global_b16(row + column", shows_in=FP32),
]  # fmt: skip
