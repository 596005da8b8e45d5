"""Ways to break the cast_rows kernel and the code that all casting kernels share, and the trials that must notice.

Mutations of activations, groups and routes are in lists of their own.
"""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_rows import cast_config
from lab.sim.cast_rows import RowTrial, hard
from lab.sim.mutate import Mutation

BF16, FP16, FP32 = (cast_config(dtype, True, False) for dtype in (torch.bfloat16, torch.float16, torch.float32))
FEW, SINGLE = (cast_config(torch.bfloat16, is_aligned, is_few=True) for is_aligned in (True, False))
SINGLE_FP32 = cast_config(torch.float32, is_aligned=False, is_few=True)
HARD_ROWS = len(hard(FP32))

TRIALS = [
    RowTrial(BF16, 67, 5 * 128 + 24, 1),
    RowTrial(BF16, 67, 5 * 128 + 24, 2, "slow_warps", data="mixed", is_m_major=False),
    RowTrial(BF16, 33, 136, 3, "slow_lanes", rounds_up=True),
    RowTrial(BF16, 33, 520, 3, data="ordinary", min_amax=1e3),
    RowTrial(BF16, 33, 136, 3, data="largest"),
    RowTrial(FP16, 35, 264, 4),
    RowTrial(FP16, 35, 264, 4, data="largest"),
    RowTrial(FP32, 35, 1028, 5),
    RowTrial(FP32, 35, 260, 6, "slow_warps", rounds_up=True),
    RowTrial(FP32, HARD_ROWS, 128, data="hard"),
    RowTrial(FEW, 6, 1416, 7, is_m_major=False),
    RowTrial(SINGLE, 6, 1403, 8, padding=3),
    RowTrial(SINGLE_FP32, 6, 771, 9, "slow_lanes", padding=3),
    RowTrial(SINGLE_FP32, 6, 771, 9, data="ordinary", padding=3),
]

_KERNEL, _VALUES, _DIVISION = "cast_rows.cuh", "cast/values.cuh", "cast/division.cuh"
_BLOCK = "cast/team_of_block.cuh"
_FP8, _ALL, _PLAIN, _TO_ROWS = "cast/fp8.cuh", "cast/rows_all.cuh", "cast/source_plain.cuh", "cast/to_rows.cuh"

MUTATIONS = [
    # Units
    Mutation("blocks of a row rounded down", _KERNEL, ": ceil_div(p.k, kBlock)", ": p.k / kBlock > 0 ? p.k / kBlock : 1"),
    Mutation("all teams take the same unit", _KERNEL, "team = ptx::thread_index() / kLanes", "team = 0"),
    Mutation("CTAs take units one team apart", _KERNEL, "first = ptx::block_index() * kTeams;", "first = ptx::block_index();"),
    Mutation("the quotient is not corrected", _VALUES, "if (block >= blocks) ++row, block -= blocks;", ""),
    Mutation("the remainder is not corrected", _VALUES, "++row, block -= blocks;", "++row;"),
    Mutation("the last rows make no unit", _ALL, "ceil_div(p.m, kRows)", "p.m / kRows"),
    Mutation("units begin one row apart", _ALL, "Unit{i * kRows, m, 0}", "Unit{i, m, 0}"),
    # Where things are
    Mutation("rows of x lie as far apart as they are long", _PLAIN, "uint64_t{row} * p.x_pitch", "uint64_t{row} * p.k * kInputBytes"),
    Mutation("every team loads the first block", _PLAIN, "block * kBlock, p.k", "0, p.k"),
    Mutation("a team loads its first row for all", _BLOCK, "load(p, unit.row + i, ", "load(p, unit.row, "),
    Mutation("rows past the last are loaded", _BLOCK, "unit.row + i < unit.end, block", "true, block"),
    Mutation("all values go to a team's first row", _TO_ROWS, "const uint32_t row = unit.row + i;", "const uint32_t row = unit.row;"),
    Mutation("rows past the last are stored", _TO_ROWS, "if (row < unit.end) store_values", "store_values"),
    Mutation("values lie as far apart as rows of x", _TO_ROWS, "uint64_t{row} * p.values_pitch", "uint64_t{row} * p.x_pitch"),
    Mutation("all values go to the first block", _TO_ROWS, "block * kBlock, p.k", "0, p.k"),
    Mutation("scales of rows that a team does not have", _TO_ROWS, "lane < kRows && row", "row"),
    Mutation("scales past the last row are stored", _TO_ROWS, "lane < kRows && row < unit.end", "lane < kRows"),
    Mutation("the two strides of the scales exchanged", "cast/scales_fp32.cuh", "row, p.scales_stride_m, block, p.scales_stride_k", "row, p.scales_stride_k, block, p.scales_stride_m"),
    Mutation("columns past the last are loaded", _VALUES, "if (is_there && column < end)", "if (is_there)", shows_in=BF16),
    Mutation("single columns past the last are loaded", _VALUES, "if (!is_there || column >= end) continue;", "if (!is_there) continue;", shows_in=SINGLE),
    Mutation("columns past the last are stored", _VALUES, "if (column < end) values.store(row, column);", "values.store(row, column);"),
    Mutation("single columns past the last are stored", _VALUES, "if (column < end) values.store_one", "values.store_one", shows_in=SINGLE),
    Mutation("lanes take single columns beside each other", _VALUES, "kVector == 1 ? element * kLanes + lane", "kVector == 1 ? element + lane", shows_in=SINGLE),
    Mutation("both elements of a word in its lower half", _VALUES, "<< i % 2 * 16", "<< 0", shows_in=SINGLE),
    Mutation("the first element of a word twice", _VALUES, "return element % kElementsOfWord == 0 ? elements.x : elements.y;", "return elements.x;"),
    # Order
    Mutation("x is loaded before the kernel ahead has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n", ""),
    # Ordinary and any
    Mutation("other blocks are left out", _BLOCK, "    cast_unit<false>(p, unit, targets, block, lane, held);", "    return;"),
    Mutation("other blocks are tried as ordinary ones again", _BLOCK, "    cast_unit<false>(p", "    cast_unit<true>(p"),
    Mutation("every block counts as ordinary", _BLOCK, "if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return false;", ""),
    Mutation("each lane decides for itself", _BLOCK, "!ptx::all_sync(is_ordinary(of_lane))", "!is_ordinary(of_lane)"),
    Mutation("tiny scales count as ordinary", _DIVISION, "return d.scale >= 0x1p-90f;", "return d.scale >= 0x1p-126f;", shows_in=FP32),
    Mutation("the scale of an infinity counts as ordinary", _DIVISION, "return d.scale >= 0x1p-90f;", "return !(d.scale < 0x1p-90f);"),
    # Largest magnitudes
    Mutation("signs count in FP32", _VALUES, "ptx::bits_of(ptx::abs_f32(ptx::float_of(word)))", "word", shows_in=FP32),
    Mutation("signs count in 16 bits", _VALUES, "word & 0x7fff7fff;", "word;"),
    Mutation("infinities count in FP32", _VALUES, "key >= kInfinity ? 0 : key", "key > kInfinity ? 0 : key", shows_in=FP32),
    Mutation("infinities count in BF16", _VALUES, ": 0x00800080)", ": 0x007f007f)"),
    Mutation("large numbers do not count in BF16", _VALUES, ": 0x00800080)", ": 0x01000100)"),
    Mutation("infinities count in FP16", _VALUES, "0x04000400", "0x03ff03ff", shows_in=FP16),
    Mutation("large numbers do not count in FP16", _VALUES, "0x04000400", "0x08000800", shows_in=FP16),
    Mutation("infinities count as second elements", _VALUES, ">> 15 & 0x00010001;", ">> 15 & 0x00000001;"),
    Mutation("words compared as numbers", _VALUES, "kInputIsFp16 ? ptx::max_f16x2(a, b) : ptx::max_bf16x2(a, b)", "a > b ? a : b"),
    Mutation("the second elements of words do not count", _VALUES, "larger_key(key, key >> 16)", "key"),
    Mutation("the last word counts alone", _VALUES, "key = larger_key(key, key_of<kIsOrdinary>(word));", "key = key_of<kIsOrdinary>(word);"),
    Mutation("a team's first row counts for all", _BLOCK, "key_of<kIsOrdinary>(held[i])", "key_of<kIsOrdinary>(held[0])"),
    Mutation("half of a team", _VALUES, "for (uint32_t distance = 1; distance < kLanesOfWarp; distance *= 2)", "for (uint32_t distance = 1; distance < kLanesOfWarp / 2; distance *= 2)"),
    Mutation("neighbours alone", _VALUES, "ptx::lane_index() ^ distance;", "ptx::lane_index() ^ 1;"),
    Mutation("a lane hands over what it should keep", _VALUES, "ptx::shfl_sync(is_odd ? even : odd, other)", "ptx::shfl_sync(is_odd ? odd : even, other)"),
    Mutation("a lane keeps what it should hand over", _VALUES, "larger_key(is_odd ? odd : even, ", "larger_key(is_odd ? even : odd, "),
    Mutation("a lane keeps the other's keys", _VALUES, "is_odd = (lane & distance) != 0;", "is_odd = (lane & distance) == 0;"),
    Mutation("keys are exchanged, not compared", _VALUES, "keys[0] = larger_key(keys[0], ptx::shfl_sync(keys[0], other));", "keys[0] = ptx::shfl_sync(keys[0], other);"),
    # Scales
    Mutation("no floor", _DIVISION, "amax = amax < min_amax ? min_amax : amax;", ""),
    Mutation("scales are multiplied, not divided", _DIVISION, "const float quotient = ptx::fma_rn(ptx::fma_rn(guess, -largest, amax), 1.f / largest, guess);", "const float quotient = guess;"),
    Mutation("no least scale", _DIVISION, "quotient < kLeastScale ? kLeastScale : quotient", "quotient", shows_in=FP32),
    Mutation("powers of two rounded down", _DIVISION, "(ptx::bits_of(least) + 0x7fffff) & 0x7f800000", "ptx::bits_of(least) & 0x7f800000"),
    Mutation("a power of two becomes the next", _DIVISION, "ptx::bits_of(least) + 0x7fffff", "ptx::bits_of(least) + 0x800000"),
    Mutation("zeros have the least scale", _DIVISION, "amax == 0.f ? 1.f : rounds_up", "rounds_up"),
    Mutation("always powers of two", _DIVISION, "rounds_up ? power : least", "power"),
    Mutation("never powers of two", _DIVISION, "rounds_up ? power : least", "least"),
    Mutation("rows by the first one's scale", _BLOCK, "divisor = {ptx::shfl_sync(of_lane.scale, first_of_team + i), ptx::shfl_sync(of_lane.reciprocal, first_of_team + i)};", "divisor = {ptx::shfl_sync(of_lane.scale, first_of_team), ptx::shfl_sync(of_lane.reciprocal, first_of_team)};"),
    Mutation("all teams by the first one's scale", _BLOCK, "first_of_team = ptx::lane_index() / kLanes * kLanes;", "first_of_team = 0;"),
    Mutation("lanes keep their reciprocals", _BLOCK, "ptx::shfl_sync(of_lane.reciprocal, first_of_team + i)", "of_lane.reciprocal"),
    # Quotients
    Mutation("a reciprocal is corrected the wrong way", _DIVISION, "ptx::fma_rn(guess, -scale, 1.f), guess, guess)", "ptx::fma_rn(guess, scale, 1.f), guess, guess)"),
    Mutation("other numbers over the scale itself", _DIVISION, "kIsOrdinary ? scale : significand_of(scale)", "scale"),
    Mutation("a significand of twice its size", _DIVISION, "| 0x3f800000)", "| 0x40000000)"),
    Mutation("other numbers by the scale itself", _DIVISION, "    d.scale = significand_of(d.scale);\n", ""),
    Mutation("infinities become the largest number", _DIVISION, "    d.scale = significand_of(d.scale);\n", "    d.scale = significand_of(d.scale), x = ptx::min_magnitude(x, 1024.f);\n"),
    Mutation("numbers as they are, by a significand", _DIVISION, "    x *= ptx::float_of(0x7f000000 - (ptx::bits_of(d.scale) & 0x7f800000));\n", ""),
    Mutation("a power of two too many", _DIVISION, "ptx::float_of(0x7f000000 - ", "ptx::float_of(0x7e800000 - "),
    Mutation("a guess is enough", _DIVISION, "return ptx::fma_rn(excess, d.reciprocal, guess);", "return guess;", shows_in=FP32),
    Mutation("negative zeros become positive", _DIVISION, "ptx::fma_rn(guess, d.scale, -x);\n  return ptx::fma_rn(excess, d.reciprocal, guess);", "ptx::fma_rn(-guess, d.scale, x);\n  return ptx::fma_rn(excess, -d.reciprocal, guess);"),
    # FP8 values
    Mutation("pairs of values exchanged", _DIVISION, "ptx::pack_e4m3(a, b) | ptx::pack_e4m3(c, d) << 16", "ptx::pack_e4m3(c, d) | ptx::pack_e4m3(a, b) << 16"),
    Mutation("the last four alone", _FP8, "values.words[i / 4] = ", "values.words[0] = "),
    Mutation("words of values exchanged", _FP8, "words[0], words[1]);", "words[1], words[0]);"),
    Mutation("a lane's first single value four times", _FP8, "words[0] >> i * 8", "words[0]", shows_in=SINGLE),
    Mutation("all values are the first row's", _BLOCK, "element_of(held[i], e), divisor", "element_of(held[0], e), divisor"),
    Mutation("all values are stored as the first row's", _BLOCK, "targets.store(p, unit, i, block, lane, pack_values(quotients))", "targets.store(p, unit, 0, block, lane, pack_values(quotients))"),
]  # fmt: skip
