"""Mistakes in fp8_gemm's code for FP4 weights, dense and of grouped rows, and the trials that must notice them."""

from __future__ import annotations

from dataclasses import replace

from deep_gemm.core.check.recipes import E2M1, MX
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.dense import DenseTrial as Trial
from lab.sim.mutate import Mutation
from lab.sim.rows import RowsTrial

FP4 = Output(b=E2M1, sfb=MX)
SMALL = tile_config(64, 64, FP4, k=128)
PLAIN = tile_config(64, 128, FP4, k=128)
ODD = tile_config(128, 128, FP4, k=128)
EVEN = replace(ODD, num_stages=4)
TALL = tile_config(256, 128, FP4)
SPLIT = tile_config(64, 64, FP4, cluster_k=2, k=128)
COUNTS = tile_config(128, 64, Output(work=works.COUNTS, b=E2M1, sfb=MX), k=128)
IDS = tile_config(64, 128, Output(work=works.IDS, b=E2M1, sfb=MX), k=128)
TALL_IDS = tile_config(256, 128, Output(work=works.IDS, b=E2M1, sfb=MX), k=128)

TRIALS = [
    *(Trial(PLAIN, 77, 200, 672, seed, any_scales=seed == 2) for seed in (1, 2)),
    *(Trial(ODD, 77, 264, 928, seed, any_scales=seed == 4) for seed in (3, 4)),
    *(Trial(ODD, 137, 296, 1568, 5, name, num_sms=1) for name in ("late_loads", "prompt_loads", "slow_lanes")),
    *(
        Trial(EVEN, 137, 296, 928, 6, name, any_scales=True, num_sms=1)
        for name in ("slow_warps", "slow_producer", "slow_math", "slow_warpgroup", "slow_lanes", "late_loads")
    ),
    *(Trial(ODD, 137, 296, k, 2, "late_loads", any_scales=True, num_sms=1) for k in (544, 928)),
    *(Trial(replace(ODD, num_stages=3), 77, 264, k, 6, any_scales=True, num_sms=1) for k in (416, 1312)),
    *(Trial(EVEN, 77, 296, 288, seed, "late_loads", num_sms=1) for seed in (1, 2, 3)),
    *(Trial(TALL, 260, 296, 416, seed, name, any_scales=seed == 8) for seed, name in ((7, "slow_math"), (8, None))),
    *(Trial(SPLIT, 72, 200, 1312, seed, any_scales=seed == 10) for seed in (9, 10)),
    *(Trial(SMALL, 5, 72, k, k, any_scales=True) for k in (32, 64, 96, 160)),
    *(Trial(SMALL, 5, 1096, 128, seed, "slow_math", any_scales=True, num_sms=1) for seed in (11, 12)),
    *(Trial(SMALL, 5, 1096, 128, 13, name, any_scales=True, num_sms=1) for name in ("slow_warps", "slow_lanes")),
    *(RowsTrial(COUNTS, (70, 0, 129, 3), seed, n=136, k=416, any_scales=seed == 15, num_sms=2) for seed in (14, 15)),
    RowsTrial(TALL_IDS, (0,) * 259 + (1,) * 97, 17, n=136, k=288, num_sms=1),
    RowsTrial(TALL_IDS, (0,) * 66 + (1,) * 193, 18, "slow_math", n=136, k=800, any_scales=True, num_sms=1),
    RowsTrial(IDS, (0,) * 70 + (-1,) * 3 + (2,) * 66, 16, "slow_warps", n=200, k=288, any_scales=True, num_sms=2),
]

_E2M1, _E4M3, _SCALES, _SLOT = "convert/e2m1.cuh", "e4m3_of_e2m1.cuh", "scales/by_slot.cuh", "slot.cuh"
_GEMM, _LOOP, _OPERAND, _OF_TILE = "fp8_gemm.cuh", "mainloop.cuh", "operand.cuh", "work/rows_of_tile.cuh"
_KNOWN = "ptx::mbarrier_wait_parity(&storage.known[slot], (number / kPassSlots & 1) ^ 1);"
_TELL = "ptx::st_shared_b32(which == 0 ? &storage.passes[slot].x : &storage.passes[slot].y, needed);"
_COUNT = "ptx::mbarrier_arrive(&storage.counted[slot]);"
_FENCED = "    ptx::fence_proxy_async_shared();\n    ptx::syncwarp();\n"
_FILL = "ptx::mbarrier_arrive(&shared.ring.full[at.stage]);"
_SCALED = "        ptx::syncwarp();\n        if (lane == 0) ptx::mbarrier_arrive(&shared.roles.packed[at.stage]);"

MUTATIONS = [
    # Barriers
    Mutation("packed misses an arrival", _E2M1, "&barrier, 1 + kScalingWarps", "&barrier, kScalingWarps"),
    Mutation("packed wants an arrival too many", _E2M1, "&barrier, 1 + kScalingWarps", "&barrier, 2 + kScalingWarps"),
    Mutation("one scaling warp counts", _E2M1, "&counted[slot], kScalingWarps", "&counted[slot], 1"),
    Mutation("all but math warps know", _E2M1, " + kNumMathWarps);  // all roles", ");"),
    Mutation("all but converting warps know", _E2M1, "kConvertGroups * kConvertWarps + kNumMathWarps);  // all", "kNumMathWarps);  // all"),
    Mutation("somebody else knows", _E2M1, "&known[slot], 1 + kScalingWarps", "&known[slot], 2 + kScalingWarps"),
    Mutation("full without those who convert", _GEMM, "shared.ring.init(kFinishingWarps);", "shared.ring.init();"),
    Mutation("B lands at the other barrier", _GEMM, "roles.full_of_b(full, stage)", "full"),
    Mutation("B is not expected", _GEMM, "if constexpr (kConvertWarps > 0) ptx::mbarrier_arrive_expect_tx(slot.full_of_b, kPackedBytes);", ""),
    Mutation("whole lines of B are expected", _SLOT, "kBoxRowsOfB * kLoadedLineBytesOfB;", "kBoxRowsOfB * kLineBytes;"),
    Mutation("B is expected with A", _SLOT, "(kConvertWarps > 0 ? 0 : kBBytes)", "kBBytes"),
    Mutation("takers of tiles that convert are not waited for", "work/rows.cuh", "1 + kConvertGroups * kConvertWarps + kScalingWarps", "1 + kScalingWarps", shows_in=IDS),
    # Passes
    Mutation("passes are read before they are told", _E2M1, "      ptx::mbarrier_wait_parity(&storage.counted[slot], number / kPassSlots & 1);\n", ""),
    Mutation("the other parity of what is told", _E2M1, "&storage.counted[slot], number / kPassSlots & 1)", "&storage.counted[slot], ~number / kPassSlots & 1)"),
    Mutation("the first scaling warp's passes", _E2M1, "kScalingWarps == 1 || needed.x > needed.y ? needed.x : needed.y", "needed.x"),
    Mutation("the second scaling warp's passes", _E2M1, "needed.x > needed.y ? needed.x : needed.y", "needed.y"),
    Mutation("nobody knows", _E2M1, "ptx::mbarrier_arrive_after(&storage.known[slot], read, !kIsWarp || ptx::lane_index() == 0);", ""),
    Mutation("every lane knows", _E2M1, "read, !kIsWarp || ptx::lane_index() == 0);", "read, true);"),
    Mutation("passes are told before the last ones are known", _E2M1, _KNOWN, ""),
    Mutation("passes are told in one place", _E2M1, "which == 0 ? &storage.passes[slot].x : &storage.passes[slot].y", "&storage.passes[slot].x"),
    Mutation("passes are counted before they are told", _E2M1, f"{_TELL}\n      {_COUNT}", f"{_COUNT}\n      {_TELL}"),
    Mutation("passes are not counted", _E2M1, f"      {_COUNT}\n", ""),
    Mutation("one pass always", _E2M1, "(kIsWarp ? ptx::shfl_sync(read, 0) : read);", "1;"),
    Mutation("a pass too many", _E2M1, "(kIsWarp ? ptx::shfl_sync(read, 0) : read);", "read + 1;"),
    Mutation("math warps multiply once", _LOOP, "} while (passes.again<true>());", "} while (false);"),
    Mutation("the producer loads once", _GEMM, "} while (passes.again<false>());", "} while (false);"),
    Mutation("a warpgroup without rows skips once", _GEMM, "} while (passes.again<true>());", "} while (false);", shows_in=COUNTS),
    Mutation("the second scaling warp tells as the first", _E2M1, "passes.tell(which, needed)", "passes.tell(0, needed)"),
    Mutation("both scaling warps have the same rows", _GEMM, "warp - (4 - kScalingWarps));", "0);"),
    # Orders
    Mutation("a scale's order is its exponent", _E2M1, "(word >> group * 8) + 1 & 255", "word >> group * 8 & 255"),
    Mutation("2^12 below does not fold apart", _E2M1, "order + kShifts <= above", "order + kShifts < above"),
    Mutation("2^11 below is apart", _E2M1, "order + kShifts <= above", "order + kShifts <= above + 1"),
    Mutation("a factor twice too large", _E2M1, "order > 0 ? order - 1 : 0", "order"),
    Mutation("a shift too few", _E2M1, "words[i] + (kShifts - most)", "words[i] + (kShifts - 1 - most)"),
    Mutation("a shift of 12 folds", _E2M1, "shifts[i] + 0x04040404", "shifts[i] + 0x03030303"),
    Mutation("negative shifts fold", _E2M1, "& 0xf0f0f0f0) == 0", "& 0x70707070) == 0"),
    Mutation("what folded folds on", _E2M1, "return (outside & 0xf0f0f0f0) == 0;", "return most != kShifts;"),
    Mutation("what folds folds below the least base too", _E2M1, " || order - kShifts >= 240) return false;", ") return false;"),
    Mutation("all scales fold", _E2M1, "if (largest - smallest >= kShifts || order - kShifts >= 240) return false;", ""),
    Mutation("each row folds apart", _E2M1, "    largest = reduce_max_sync(largest), smallest = ptx::reduce_min_sync(smallest);\n", ""),
    Mutation("the old factor for new shifts", _E2M1, "most = order, factor = factor_of(order);", "most = order;"),
    Mutation("the old shifts for a new factor", _E2M1, "    fold(words, shifts);\n", ""),
    Mutation("the last scales in every pass", _E2M1, "order = passes <= pass ? found : order;", "order = found;"),
    Mutation("rows that are done are multiplied again", _E2M1, "    if (passes <= pass) order = 0;  // this pass has no scales left\n", ""),
    Mutation("NaN is zero where scales do not fold", _E2M1, "of_group == 0 ? kNaNs", "of_group == 0 ? kZeros"),
    Mutation("larger scales than a pass's take part", _E2M1, ": shift >= kShifts ?", ": shift >= 16 * kShifts ?"),
    Mutation("one group's scale for all where scales do not fold", _E2M1, "of_group = order_of(words[i], g), shift", "of_group = order_of(words[i], 0), shift"),
    # Scaling
    Mutation("scales of rows past the last", _E2M1, "(row < p.n ? row : p.n - 1)", "(row)"),
    Mutation("scales of k-blocks before a split's", _E2M1, "static_cast<uint64_t>(k_blocks.first)", "static_cast<uint64_t>(0)", shows_in=SPLIT),
    Mutation("scales of a k-block past the last", _E2M1, "if (k_block + 1 < k_blocks.end) rows.coming", "rows.coming"),
    Mutation("scales of the k-block before", _E2M1, "          rows.next[i] += p.sfb_stride_k;\n", ""),
    Mutation("scales behind the last group count", _E2M1, "word = scales_within(word, (p.k - k_block * kBlockK) / 32);", ";"),
    Mutation("a group fewer counts", _E4M3, "groups == 1 ? 0x0000 : groups == 2 ? 0x0010 : 0x0210", "groups == 1 ? 0x0000 : groups == 2 ? 0x0000 : 0x0010"),
    Mutation("a group more counts", _E4M3, "groups == 1 ? 0x0000 : groups == 2 ? 0x0010 : 0x0210", "groups == 1 ? 0x0010 : groups == 2 ? 0x0210 : 0x3210"),
    Mutation("the last 32 rows say whether all fold", _E2M1, "outside |= shifts[i]", "outside = shifts[i]"),
    Mutation("rows fold anew in every pass", _E2M1, "pass == 0 && rows.folds_anew", "rows.folds_anew"),
    Mutation("the passes of the last k-block alone", _E2M1, "needed = of_rows > needed ? of_rows : needed;", "needed = of_rows;"),
    Mutation("shifts overwrite those that are read", _E2M1, "        wait_until_free(shared.ring, at);\n#pragma", "#pragma"),
    Mutation("shifts of the first 32 rows", _E2M1, "which * 64 + i * 32 + lane], shifts[i]", "which * 64 + lane], shifts[i]"),
    Mutation("shifts of the first 64 rows", _E2M1, "which * 64 + i * 32 + lane], shifts[i]", "i * 32 + lane], shifts[i]"),
    Mutation("one factor for both halves", _E2M1, "kScaleRows + which], factor", "kScaleRows], factor"),
    Mutation("a scaling warp arrives before its lanes have stored", _E2M1, _SCALED, _SCALED.split("\n")[1]),
    # Converting
    Mutation("both rounds by the first one's shifts", _E2M1, "shifts_at + kRowsOfRound * 4) << 16", "shifts_at) << 16"),
    Mutation("shifts of the first half of a row", _E2M1, "warp * 32 + row]) + half * 2;", "warp * 32 + row]);"),
    Mutation("shifts of the first slot", _E2M1, "first_shifts + at.stage * (kBlockN * 4)", "first_shifts"),
    Mutation("zeros by tables of values", _E2M1, "(kZeros | kNaNs) * 0x01010101", "kNaNs * 0x01010101"),
    Mutation("NaNs by tables of values", _E2M1, "if (shift >= kNaNs)", "if (shift > kNaNs)"),
    Mutation("NaN is zero", _E2M1, "shift == kZeros ? 0 : 0x7f7f7f7f", "0"),
    Mutation("zero is NaN", _E2M1, "shift == kZeros ? 0 : 0x7f7f7f7f", "0x7f7f7f7f"),
    Mutation("both groups by the first one's table", _E2M1, "i == 0 ? first : second", "first", everywhere=True),
    Mutation("8 values twice", _E2M1, "e4m3_of_eight(codes[part * 2 + 1]", "e4m3_of_eight(codes[part * 2]"),
    Mutation("values are not swizzled", _E2M1, "to ^ (i * 2 + part) * 16", "to + (i * 2 + part) * 16"),
    Mutation("rows are written where they are not read", _E2M1, "half * 4 ^ row % 8", "half * 4"),
    Mutation("packed rows are taken for unswizzled ones", _E2M1, "half * 2 ^ row / 2 % 4", "half * 2"),
    Mutation("the second group is read beside the first", _E2M1, "(from ^ i % 2 * 16)", "(from + i % 2 * 16)"),
    Mutation("rows of 128 bytes are read", _E2M1, "i / 2 * (kRowsOfRound * kBlockK / 2)", "i / 2 * (kRowsOfRound * kBlockK)"),
    Mutation("the second round over the first", _E2M1, "to + kRowsOfRound * kBlockK);", "to);"),
    Mutation("the first warp's rows for all", _E2M1, "(shared.b[0]) + warp * (32 * kBlockK)", "(shared.b[0])"),
    Mutation("packed values of the first slot", _E2M1, "first_from + at.stage * kBBytes", "first_from"),
    Mutation("values into the first slot", _E2M1, "first_to + at.stage * kBBytes", "first_to"),
    Mutation("both warpgroups convert each slot", _E2M1, "kConvertGroups == 2 && (is_turn = !is_turn)", "(is_turn = !is_turn) && false"),
    Mutation("both warpgroups convert the same slots", _E2M1, "is_turn = group == 0;", "is_turn = true;"),
    Mutation("turns begin anew with each tile", _E2M1, "convert_tile(p, shared, warp, is_turn, tile, at);", "{ bool turn = is_turn; convert_tile(p, shared, warp, turn, tile, at); }"),
    Mutation("packed is not waited for", _E2M1, "    ptx::mbarrier_wait_parity(&shared.roles.packed[at.stage], at.parity);\n", ""),
    Mutation("the time between is not seen", _E2M1, "if constexpr (kNumStages % kConvertGroups != 0)", "if constexpr (false)", shows_in=ODD),
    Mutation("values are written where others still read", _E2M1, "    ptx::syncwarp();  // all lanes must have read before a lane overwrites\n", ""),
    Mutation("tensor cores may not see the values", _E2M1, _FENCED, "    ptx::syncwarp();\n"),
    Mutation("one lane says that all have converted", _E2M1, _FENCED, "    ptx::fence_proxy_async_shared();\n"),
    Mutation("a fence for one lane's values", _E2M1, _FENCED, "    ptx::syncwarp();\n    if (lane == 0) ptx::fence_proxy_async_shared();\n"),
    Mutation("full is not told", _E2M1, _FILL, ";"),
    Mutation("full is told by every lane", _E2M1, f"if (lane == 0) {_FILL}", _FILL),
    # Loads
    Mutation("B twice as far along k", _OPERAND, "k / kPackedB", "k"),
    Mutation("the rows of all warps in one place", _OPERAND, "slot.b + row * kLineBytes", "slot.b"),
    Mutation("the rows of warps close to each other", _OPERAND, "slot.b + row * kLineBytes", "slot.b + row * kLoadedLineBytesOfB"),
    Mutation("the first rows for all warps", _OPERAND, "                                                        tile.row_n + row,", "tile.row_n,"),
    Mutation("the first scales in both boxes", _OF_TILE, "tile.row_m - skipped_scales(tile) + row,\n", "tile.row_m - skipped_scales(tile),\n", shows_in=TALL_IDS),
    Mutation("both boxes of scales in one place", _OF_TILE, "slot.scales + row, tile.row_m - skipped", "slot.scales, tile.row_m - skipped", shows_in=TALL_IDS),
    Mutation("a short tile keeps its slots", _LOOP, "is_part) return release(ring, slots[0], ptx::lane_index());", "is_part) return;", shows_in=TALL_IDS),
    Mutation("whole tiles are short", _LOOP, "i == kUnitsOfPart && is_part)", "i == kUnitsOfPart)", shows_in=TALL_IDS),
    Mutation("a short tile goes on to the next slot at its end", _LOOP, "(kBranchesOnParts ? kUnitsOfPart : kPieces)", "kPieces", shows_in=TALL_IDS),
    Mutation("B of groups twice as far along k", _OF_TILE, "k / kPackedB", "k", shows_in=COUNTS),
    # Values
    Mutation("0.5 is 0.25", _E4M3, "kLowValues = 0x3c383000", "kLowValues = 0x3c382800"),
    Mutation("no shift beyond 2^5", _E4M3, "kShiftOfOne = 5", "kShiftOfOne = 4"),
    Mutation("the second four by the first's places", _E4M3, "places >> 16);", "places);"),
    Mutation("the second four without signs", _E4M3, "high | (ptx::byte_perm(shifted, codes, 0x7362) & 0x80808080)", "high"),
    Mutation("signs of even and odd values exchanged", _E4M3, "byte_perm(shifted, codes, 0x5140)", "byte_perm(shifted, codes, 0x1504)"),
    Mutation("the sign's bit takes part in the place", _E4M3, "codes & 0x77777777", "codes"),
    # Promotion
    Mutation("one row's scale for both", _SCALES, "rows[1] * factor", "rows[0] * factor"),
    Mutation("the first 64 rows' factor for all", _SCALES, "+ column == 0 ? factors", "+ column >= 0 ? factors"),
    Mutation("factors of the first slot", _SCALES, "in_first_slot.sfb + stage * kScales", "in_first_slot.sfb"),
    Mutation("slots are given back with a unit to go", _SCALES, "if (unit + 1 == kUnits)", "if (unit == 0)", shows_in=TALL),
]  # fmt: skip
