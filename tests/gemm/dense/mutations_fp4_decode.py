"""Mistakes in the fp8_gemm_decode kernel's code for FP4 weights, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.core.check.recipes import E2M1, MX
from deep_gemm.gemm.config.decode import DecodeConfig
from lab.sim.fp8_gemm_decode import DecodeTrial as Trial
from lab.sim.mutate import Mutation

ALONE = DecodeConfig(16, 3, 1, 1, b=E2M1, sfb=MX)
WIDE = DecodeConfig(24, 2, 2, 1, is_fp32=True, b=E2M1, sfb=MX)
HIGH = DecodeConfig(64, 2, 1, 2, b=E2M1, sfb=MX)
SPLIT = DecodeConfig(8, 2, 2, 3, with_c=True, b=E2M1, sfb=MX)

TRIALS = [
    *(Trial(ALONE, 13, 200, 1312, seed) for seed in (1, 2)),
    *(Trial(ALONE, 13, 72, 1312, seed, any_scales=True) for seed in (3, 4)),
    *(Trial(ALONE, 17, 72, 2464, 5, name) for name in ("late_loads", "slow_math", "slow_producer", "slow_lanes")),
    *(Trial(ALONE, 16, 64, 4160, seed, "slow_warps", any_scales=seed == 7) for seed in (5, 6, 7)),
    *(Trial(WIDE, 23, 200, 672, seed, any_scales=seed == 9) for seed in (8, 9)),
    *(Trial(WIDE, 23, 200, 4352, seed, "slow_warps") for seed in (10, 11, 12)),
    *(Trial(HIGH, 61, 72, 928, seed, any_scales=seed == 14) for seed in (13, 14)),
    *(Trial(SPLIT, 7, 136, 1312, seed, any_scales=seed == 16) for seed in (15, 16)),
    *(Trial(SPLIT, 7, 136, k, 17, "slow_math", is_dependent=True, weight_is_ready=True) for k in (160, 1312)),
    *(Trial(ALONE, 5, 72, k, k, any_scales=True) for k in (32, 64, 96, 160)),
]

_E2M1, _E4M3, _DECODE = "decode/e2m1.cuh", "e4m3_of_e2m1.cuh", "fp8_gemm_decode.cuh"
_TILE, _STORE = "decode/tile.cuh", "    scales.store(p, first, shared.scales);\n"

MUTATIONS = [
    # Values
    Mutation("0.5 is 0.25", _E4M3, "kLowValues = 0x3c383000", "kLowValues = 0x3c382800"),
    Mutation("6 is 5", _E4M3, "kHighValues = 0x4c484440", "kHighValues = 0x4a484440"),
    Mutation("zero is shifted too", _E4M3, "shift * 0x08080800)", "shift * 0x08080808)"),
    Mutation("signs of odd values", _E4M3, "codes << 4, codes, 0x5140", "codes << 4, codes, 0x5540"),
    Mutation("signs of the values behind", _E4M3, "ptx::byte_perm(codes << 4, codes, 0x5140)", "ptx::byte_perm(codes, codes << 4, 0x5140)"),
    Mutation("no value is negative", _E4M3, "magnitudes | (signs & 0x80808080)", "magnitudes"),
    Mutation("the second half of a group is the first", _E2M1, "ptx::ld_shared_u16(at + 8)", "ptx::ld_shared_u16(at)"),
    Mutation("rows 8 apart are one", _E2M1, "b + i * 8 * kBlockK +", "b +"),
    Mutation("a row's table for both", _E2M1, "fragment[i + 2] = e4m3_of(ptx::ld_shared_u16(at + 8), tables[i]);", "fragment[i + 2] = e4m3_of(ptx::ld_shared_u16(at + 8), tables[0]);"),
    Mutation("chunks are not swizzled", _E2M1, "((chunk ^ lane / 4) * 16)", "(chunk * 16)"),
    Mutation("lanes of a row take the same", _E2M1, " + lane % 4 * 2;  // swizzled", ";  // swizzled"),
    Mutation("the second k-block's values are the first's", _E2M1, "load_fragments(fragments[1], b, kGroupsOfBlock, rows[1]);", "load_fragments(fragments[1], b, 0, rows[1]);"),
    Mutation("the second k-block's scales are the first's", _E2M1, "load_fragments(fragments[1], b, kGroupsOfBlock, rows[1]);", "load_fragments(fragments[1], b, kGroupsOfBlock, rows[0]);"),
    Mutation("the second k-block's tokens are the first's", _E2M1, "issue(partial[1], fragments[1], a + kABytes / 16);", "issue(partial[1], fragments[1], a);", shows_in=ALONE),
    Mutation("the same, of one sum at a time", _E2M1, "issue(partial[0], fragments[1], a + kABytes / 16);", "issue(partial[0], fragments[1], a);", shows_in=HIGH),
    Mutation("the second warpgroup has the first's rows", _E2M1, "(warpgroup * 64 + row) * kBlockK", "row * kBlockK", shows_in=WIDE),
    # Scales
    Mutation("scales 2^12 apart fold", _E2M1, "most - least < kShifts", "most - least <= kShifts"),
    Mutation("all scales fold", _E2M1, "folds = most - least < kShifts || most == 255;", "folds = true;"),
    Mutation("one warp's rows say whether all fold", _E2M1, "(fold.x & fold.y & fold.z & fold.w) != 0", "(fold.x & fold.z) != 0"),
    Mutation("the first k-block says whether both fold", _E2M1, "(fold.x & fold.y & fold.z & fold.w) != 0", "(fold.x & fold.y) != 0"),
    Mutation("a factor 2 too large", _E4M3, "most - kMostShift << 23", "most - kMostShift + 1 << 23"),
    Mutation("a row's factor for both", _E2M1, "partial[i] *= ptx::float_of(rows[i / 2 % 2].y);", "partial[i] *= ptx::float_of(rows[0].y);"),
    Mutation("the second k-block's factor is the first's", _E2M1, "scale_rows(partial[kNumPartials - 1], rows[1]);", "scale_rows(partial[kNumPartials - 1], rows[0]);"),
    Mutation("scales behind the last group count", _E4M3, "if (groups < kGroupsOfBlock) word", "if (false) word"),
    Mutation("one group too many counts", _E4M3, "groups == 1 ? 0x0000 : groups == 2 ? 0x0010 : 0x0210", "groups == 1 ? 0x0010 : groups == 2 ? 0x0210 : 0x3210"),
    Mutation("scales of the last row past it", _E2M1, "static_cast<uint64_t>(row < p.n ? row : p.n - 1)", "static_cast<uint64_t>(row)"),
    Mutation("scales past the last k-block", _E2M1, "first_k_block + i < work.end_k_block ? first_k_block + i : work.end_k_block - 1", "first_k_block + i"),
    Mutation("scales of tokens past the last", _E2M1, "static_cast<uint64_t>(token < p.m ? token : p.m - 1)", "static_cast<uint64_t>(token)"),
    Mutation("scales of every second k-block", _E2M1, "const uint32_t at = k_block(i * 2 + thread / 64);", "const uint32_t at = k_block(i * 2);"),
    Mutation("scales of the first warpgroup's rows", _E2M1, "work.row_n + ptx::warp_index() / 4 * 64 + thread % 64;", "work.row_n + thread % 64;", shows_in=WIDE),
    Mutation("the next scales are not loaded", _TILE, "if (first + kBlocks < work.end_k_block) scales.load", "if (false) scales.load"),
    Mutation("scales are overwritten while they are read", _TILE, "    ptx::bar_sync(1, kNumMathThreads);  // all warps have read the previous scales\n", ""),
    Mutation("scales are read before they are there", _TILE, _STORE + "    ptx::bar_sync(1, kNumMathThreads);\n", _STORE),
    Mutation("the second k-block's scales of tokens are the first's", _E2M1, "shared.scales.tokens[i + 1]", "shared.scales.tokens[i]"),
    # Groups that do not fold
    Mutation("one group's tokens for all", _E2M1, "fragment, a_low + g * 2);", "fragment, a_low);"),
    Mutation("one group's values for all", _E2M1, "load_fragment(fragment, b, first + g, tables);", "load_fragment(fragment, b, first, tables);"),
    Mutation("one group's scale for all", _E2M1, "{ return rows[i].x >> g * 8 & 255; }", "{ return rows[i].x & 255; }"),
    Mutation("rows that fold are taken for others", _E2M1, "{ return rows[i].y != 0; }", "{ return false; }"),
    Mutation("rows that do not fold are taken for others", _E2M1, "{ return rows[i].y != 0; }", "{ return true; }"),
    Mutation("the last group alone", _E2M1, "ptx::fma(of_group[i], scales[i / 2 % 2], partial[i])", "of_group[i] * scales[i / 2 % 2]"),
    Mutation("a group's sum is not waited for", _E2M1, "    ptx::fence_registers(of_group);\n    ptx::wgmma_wait_group<0>();\n", "    ptx::fence_registers(of_group);\n"),
    Mutation("the second k-block of a pair is left out", _E2M1, "block < kSlotBlocks && i + block < count", "block < 1"),
    Mutation("a k-block past the last", _E2M1, "block < kSlotBlocks && i + block < count", "block < kSlotBlocks"),
    # The ring
    Mutation("full is not waited for", _E2M1, "      wait_until_loaded(shared.ring, at);\n", ""),
    Mutation("slots are given back before the product is done", _E2M1, "        ptx::wgmma_wait_group<0>();\n        release(shared.ring, at, lane);\n", "        release(shared.ring, at, lane);\n        ptx::wgmma_wait_group<0>();\n"),
    Mutation("slots are never given back", _E2M1, "        ptx::wgmma_wait_group<0>();\n        release(shared.ring, at, lane);\n", "        ptx::wgmma_wait_group<0>();\n"),
    Mutation("slots are not given back where scales do not fold", _E2M1, "        ptx::syncwarp();\n        release(shared.ring, at, lane);\n", "        ptx::syncwarp();\n"),
    Mutation("the first sum is not waited for", _E2M1, "        ptx::wgmma_wait_group<kNumPartials - 1>();\n", ""),
    Mutation("the last sum is not waited for", _E2M1, "        ptx::wgmma_wait_group<0>();\n        release", "        release"),
    Mutation("B of the next k-block", _DECODE, "i * (kBlockK / kSlotBlocks), work.row_n", "i * kBlockK, work.row_n"),
    Mutation("A of one k-block for both", _DECODE, "(i + block) * kBlockK, work.row_m", "i * kBlockK, work.row_m"),
    Mutation("A of both in one place", _DECODE, "shared.a[stage] + block * kABytes", "shared.a[stage]"),
    Mutation("each k-block ahead has a slot", _DECODE, "stage * kSlotBlocks < end_ahead - work.k_block; ++stage", "stage < end_ahead - work.k_block; ++stage"),
]  # fmt: skip
