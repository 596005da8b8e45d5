"""Mistakes in cast_rows where it writes a row to the rows of its routes, and the trials that must notice them."""

from __future__ import annotations

from dataclasses import replace

import torch

from deep_gemm.casts.cast_rows import cast_config
from lab.sim.cast_rows import RowTrial
from lab.sim.mutate import Mutation

FEW, SINGLE = (cast_config(torch.bfloat16, is_aligned, is_few=True, to_routes=True) for is_aligned in (True, False))
BF16 = replace(FEW, rows=4)  # no configuration that calls choose has several rows for a team

TRIALS = [
    RowTrial(BF16, 23, 264, 1, data="mixed", topk=3),
    RowTrial(BF16, 23, 120, 2, "slow_warps", data="ordinary", topk=20, is_m_major=False),
    RowTrial(BF16, 23, 136, 3, "slow_lanes", data="ordinary", topk=40),
    RowTrial(FEW, 9, 520, 4, data="mixed", topk=8),
    RowTrial(SINGLE, 9, 261, 5, data="mixed", topk=40, padding=3),
]

_TO = "cast/to_routes.cuh"
_LOOP = "for (uint32_t first = 0; first < p.topk; first += kLanesOfWarp)"

MUTATIONS = [
    # Routes
    Mutation("all rows go where the first one goes", _TO, "routes[i] = route_of(p, unit, i, ", "routes[i] = route_of(p, unit, 0, "),
    Mutation("routes of rows past the last", _TO, "row < unit.end && j < p.topk", "j < p.topk"),
    Mutation("routes of the next row", _TO, "row < unit.end && j < p.topk", "row < unit.end"),
    Mutation("rows' routes lie one apart", _TO, "uint64_t{row} * p.topk + j", "uint64_t{row} + j"),
    Mutation("the first routes again", _TO, "route_of(p, unit, i, first + lane", "route_of(p, unit, i, lane"),
    Mutation("routes at hand for all", _TO, "first == 0 ? routes[i]", "true ? routes[i]"),
    Mutation("no more routes than a team has lanes", _TO, _LOOP, _LOOP.replace("first < p.topk", "first < kLanesOfWarp"), everywhere=True),
    # Values
    Mutation("routes of lanes that a team does not have", _TO, "p.topk - first < kLanesOfWarp ? p.topk - first : kLanesOfWarp", "p.topk - first"),
    Mutation("four routes at most", _TO, "four < count; four += 4", "four < 1; four += 4"),
    Mutation("the same four routes again", _TO, "uint32_t j = four; j < four + 4; ++j", "uint32_t j = 0; j < 4; ++j"),
    Mutation("three of four routes", _TO, "j < four + 4; ++j", "j < four + 3; ++j"),
    Mutation("all teams' values go where the first one's go", _TO, "first_of_team + j)", "j)"),
    Mutation("all values go to the first route", _TO, "first_of_team + j)", "first_of_team)"),
    Mutation("values go to rows that are none", _TO, "if (to >= 0) store_values", "store_values"),
    Mutation("values lie as far apart as rows of x", _TO, "static_cast<uint64_t>(to) * p.values_pitch", "static_cast<uint64_t>(to) * p.x_pitch"),
    Mutation("all values go to the first block", _TO, "block * kBlock, p.k", "0, p.k"),
    # Scales
    Mutation("rows have the first one's scale", _TO, "ptx::shfl_sync(of_lane, first_of_team + i)", "ptx::shfl_sync(of_lane, first_of_team)"),
    Mutation("teams have the first one's scales", _TO, "ptx::shfl_sync(of_lane, first_of_team + i)", "ptx::shfl_sync(of_lane, i)"),
    Mutation("lanes have scales of their own", _TO, "const float scale = ptx::shfl_sync(of_lane, first_of_team + i);", "const float scale = of_lane;"),
    Mutation("scales go to rows that are none", _TO, "if (to >= 0) store_scale", "store_scale"),
    Mutation("the two strides of the scales exchanged", "cast/scales_fp32.cuh", "row, p.scales_stride_m, block, p.scales_stride_k", "row, p.scales_stride_k, block, p.scales_stride_m"),
]  # fmt: skip
