"""Mistakes in casts of whole rows and of whole tensors, and the trials that must notice them."""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_rows import MOST_PARTS, PIECES, Groups, cast_config
from deep_gemm.casts.rules import AMAX_OF_TENSOR, PER_TENSOR, Target
from lab.sim.cast_rows import GIVEN, RowTrial, hard
from lab.sim.mutate import Mutation

WHOLE = Target(columns=0)
WARP, WARPS, FP32 = (
    cast_config(dtype, True, False, to=WHOLE, lanes=lanes)
    for dtype, lanes in ((torch.bfloat16, 32), (torch.bfloat16, 128), (torch.float32, 128))
)
OF_GROUPS = cast_config(torch.bfloat16, True, False, groups=Groups.COUNTS, to=WHOLE, lanes=128)
TO_ROUTES = cast_config(torch.bfloat16, True, False, to_routes=True, to=WHOLE, lanes=128)
HELD = PIECES * WARPS.lanes * WARPS.vector
HARD_ROWS = len(hard(FP32))

TRIALS = [
    RowTrial(WARP, 11, 264, 1),
    RowTrial(WARP, 9, 1400, 2, "slow_lanes", data="mixed", is_m_major=False),
    RowTrial(WARPS, 3, HELD + 1208, 3, "slow_warps", data="ordinary"),
    RowTrial(WARPS, 3, HELD + 1208, 4, data="mixed", rounds_up=True),
    RowTrial(WARPS, 5, 2056, 5, "slow_warps"),
    RowTrial(WARPS, 3, 1032, 6, data="ordinary", min_amax=1e3),
    RowTrial(FP32, HARD_ROWS, 128, data="hard"),
    RowTrial(OF_GROUPS, 120, 1032, 7, "slow_warps", sizes=(38, 0, 33), num_sms=1, data="mixed"),
    RowTrial(TO_ROUTES, 5, 1160, 8, "slow_warps", topk=40, data="mixed"),
    RowTrial(TO_ROUTES, 5, 1160, 9, topk=3, data="ordinary"),
]

_TEAM, _KERNEL, _TO, _VALUES = "cast/team_of_row.cuh", "cast_rows.cuh", "cast/to_routes.cuh", "cast/values.cuh"
MUTATIONS = [
    # Pieces
    Mutation("the pieces in registers are all the first", _TEAM, "loaded[i] = piece(i);", "loaded[i] = piece(0);"),
    Mutation("no more than is held", _TEAM, "for (uint32_t i = kPieces; i * kBlock < p.k; ++i)", "for (uint32_t i = kPieces; false; ++i)"),
    Mutation("the first piece behind those held again", _TEAM, "held_of(p, piece(i)));", "held_of(p, piece(kPieces)));"),
    Mutation("one piece behind those held is left out", _TEAM, "for (uint32_t i = kPieces; i *", "for (uint32_t i = kPieces + 1; i *"),
    Mutation("a row has as many units as blocks", _KERNEL, "kWholeRows ? 1 : ceil_div(p.k, kBlock)", "ceil_div(p.k, kBlock)"),
    # The largest magnitude
    Mutation("the last piece counts alone", _TEAM, "keys[0] = larger_key(keys[0], key_of<false>(piece));", "keys[0] = key_of<false>(piece);"),
    Mutation("infinities count", _TEAM, "key_of<false>(piece)", "key_of<true>(piece)"),
    Mutation("each warp has a scale of its own", _TEAM, "if constexpr (kLanes > 32)", "if constexpr (false)"),
    Mutation("the last warp does not count", _TEAM, "warp < kLanes / 32; ++warp", "warp + 1 < kLanes / 32; ++warp"),
    Mutation("all warps meet in one word", _TEAM, "st_shared_b32(of_warps + lane / 32, key)", "st_shared_b32(of_warps, key)"),
    Mutation("a warp does not wait for the others", _TEAM, "key);\n    ptx::syncthreads();\n#pragma", "key);\n#pragma"),
    Mutation("the next row's keys come early", _TEAM, "    ptx::syncthreads();  // the keys have been read: the next row's may overwrite them\n", ""),
    Mutation("warps meet where groups lie", _TEAM, "(kSharedBytes / 4 - kLanes / 32)", "0", shows_in=OF_GROUPS),
    Mutation("lanes of a warp alone", _VALUES, "kLanes < 32 ? kLanes : 32;", "kLanes < 32 ? kLanes : 16;"),
    # Scales and values
    Mutation("any row counts as ordinary", _TEAM, "if (is_ordinary(ordinary))", "if (true)"),
    Mutation("other rows are left out", _TEAM, "    else\n      store([&](float x) { return quotient_of<false>(x, any); });\n", ""),
    Mutation("other rows by the ordinary way's reciprocal", _TEAM, "quotient_of<false>(x, any)", "quotient_of<false>(x, ordinary)"),
    Mutation("never powers of two", _TEAM, "p.min_amax, p.rounds_up)", "p.min_amax, false)", everywhere=True),
    Mutation("no least amax", _TEAM, "p.min_amax, p.rounds_up)", "0.f, p.rounds_up)", everywhere=True),
    Mutation("all values go to the first block", _TEAM, "targets.store(p, unit, 0, i, lane", "targets.store(p, unit, 0, 0, lane"),
    Mutation("scales are left out", _TEAM, "    if (lane < 32) targets.store_scales(p, unit, 0, lane, any.scale);\n", ""),
    Mutation("x is loaded before the kernel ahead has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n", ""),
    # Routes
    Mutation("routes by the lane of a team", _TO, "route_of(p, unit, i, lane % kLanesOfWarp)", "route_of(p, unit, i, lane)", shows_in=TO_ROUTES),
    Mutation("further routes by the lane of a team", _TO, "first + lane % kLanesOfWarp", "first + lane", shows_in=TO_ROUTES),
]  # fmt: skip

BY_GIVEN, SINGLE = (cast_config(torch.float32, aligned, False, to=PER_TENSOR, lanes=32) for aligned in (True, False))
GIVEN_TRIALS = [
    *(RowTrial(BY_GIVEN, 9, 264, seed, scale=scale) for seed, scale in enumerate(GIVEN)),
    RowTrial(BY_GIVEN, 9, 1160, 10, "slow_warps", data="largest", scale=2.0**-89),
    RowTrial(BY_GIVEN, 9, 1160, 11, data="ordinary"),
    RowTrial(BY_GIVEN, HARD_ROWS, 128, data="hard", scale=8 / 9),
    RowTrial(SINGLE, 9, 131, 12, scale=3.0, padding=3),
]
GIVEN_MUTATIONS = [
    Mutation("the scale is one", _TEAM, "number(kIsGiven ? ptx::ld_global_f32(p.scales) : 0.f)", "number(kIsGiven ? 1.f : 0.f)"),
    Mutation("tiny scales are plain", _TEAM, "!is_ordinary(d) || d.scale", "d.scale"),
    Mutation("the largest scales are plain", _TEAM, "!is_ordinary(d) || d.scale > 0x1p90f", "!is_ordinary(d)"),
    Mutation("an infinity by a strange scale is the largest number", _TEAM, "ptx::abs_f32(x) < ptx::float_of(kInfinity) ? x / d.scale : ptx::float_of(kNan)", "x / d.scale"),
    Mutation("a guess may be infinite", _TEAM, "ptx::min_magnitude(x * -d.reciprocal, 0x1p12f)", "x * -d.reciprocal"),
    Mutation("an infinity is the largest number", _TEAM, "ptx::fma_rn(x, 0.f, ptx::fma_rn(guess, d.scale, -x));", "ptx::fma_rn(guess, d.scale, -x);"),
    Mutation("a guess is enough", _TEAM, "return ptx::fma_rn(excess, d.reciprocal, guess);", "return guess;"),
    Mutation("a scale is stored", _TEAM, "if constexpr (kIsGiven) return store(", "if constexpr (kIsGiven) return targets.store_scales(p, unit, 0, lane, 1.f), store("),
]  # fmt: skip

AMAX, AMAX_WARPS = (cast_config(torch.bfloat16, True, False, to=AMAX_OF_TENSOR, lanes=lanes) for lanes in (32, 128))
AMAX_FP32 = cast_config(torch.float32, True, False, to=AMAX_OF_TENSOR, lanes=32)
AMAX_TRIALS = [
    RowTrial(AMAX, MOST_PARTS * AMAX.teams + 77, 8, 1, data="ordinary"),
    RowTrial(AMAX, 11, 1400, 2),
    RowTrial(AMAX_WARPS, 3, HELD + 1208, 3, "slow_warps"),
    RowTrial(AMAX_FP32, 11, 136, 4, data="largest"),
]
AMAX_MUTATIONS = [
    Mutation("a team's last row alone", _TEAM, "ptx::max_f32(number, amax)", "amax"),
    Mutation("a team takes one row", "cast/rows_all.cuh", "kIsShared = kFindsAmax", "kIsShared = false"),
    Mutation("a CTA's teams have one part", _TEAM, "ptx::block_index() * kTeams + ptx::thread_index() / kLanes", "ptx::block_index() * kTeams", shows_in=AMAX),
    Mutation("CTAs have parts one apart", _TEAM, "ptx::block_index() * kTeams + ", "ptx::block_index() + ", shows_in=AMAX),
]  # fmt: skip
