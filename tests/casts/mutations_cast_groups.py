"""Mistakes in cast_rows where it finds groups' rows by counts and by ends, and the trials that must notice them."""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_rows import Groups, cast_config
from lab.sim.cast_rows import RowTrial
from lab.sim.mutate import Mutation

COUNTS = cast_config(torch.bfloat16, is_aligned=True, is_few=False, groups=Groups.COUNTS)
COUNTS_FEW = cast_config(torch.float32, is_aligned=True, is_few=True, groups=Groups.COUNTS)
ENDS = cast_config(torch.bfloat16, is_aligned=True, is_few=False, activates=True, groups=Groups.ENDS)
ENDS_FEW = cast_config(torch.bfloat16, is_aligned=True, is_few=True, activates=True, groups=Groups.ENDS)
UNTIL = cast_config(torch.bfloat16, is_aligned=True, is_few=False, activates=True, groups=Groups.UNTIL)
MANY = tuple(i * 7 % 5 for i in range(700))  # more groups than a warp can count with one for each thread

TRIALS = [
    RowTrial(COUNTS, 60, 136, 1, data="mixed", sizes=(0, 12, 5, 1, 11)),
    RowTrial(COUNTS, 64, 136, 2, data="ordinary", sizes=(-5, 17, 2**31 - 1, -(2**31)), is_m_major=False),
    RowTrial(COUNTS, 5 * len(MANY), 8, 3, data="ordinary", sizes=MANY),
    RowTrial(COUNTS_FEW, 300, 520, 4, data="ordinary", sizes=(70, 0, 75, 3), num_sms=1),
    *(RowTrial(COUNTS, 200, 136, seed, "slow_warps", data="ordinary", sizes=(1, 0, 2, 3) * 10) for seed in (5, 6, 7)),
    RowTrial(ENDS, 60, 136, 8, data="ordinary", sizes=(0, 5, 5, 17, 33, 50), alignment=8),
    RowTrial(ENDS, 48, 136, 9, data="ordinary", sizes=(-3, 20, 30)),
    RowTrial(ENDS, 48, 136, 10, data="ordinary", sizes=(30, -5, 5, 200, 200, 40), alignment=8),
    RowTrial(ENDS, 48, 136, 11, data="ordinary", sizes=()),
    RowTrial(ENDS_FEW, 200, 520, 12, data="ordinary", sizes=(70, 70, 190), num_sms=1),
    RowTrial(UNTIL, 90, 136, 13, data="ordinary", sizes=(7, 7, 41)),
    RowTrial(UNTIL, 40, 136, 14, data="ordinary", sizes=(7, 200)),
    RowTrial(UNTIL, 40, 136, 15, data="ordinary", sizes=(7, -1)),
]

_KERNEL, _ROWS, _LANES = "cast_rows.cuh", "cast/rows_of_groups.cuh", "lanes.cuh"
_UNTIL = "cast/rows_until.cuh"
_TO_ROWS = "cast/to_rows.cuh"
_WAIT = "  ptx::griddepcontrol_wait();\n"
_MADE = "  const Rows rows(p);\n"

MUTATIONS = [
    # Counts
    Mutation("counts below zero are all rows", _ROWS, "count < 0 ? 0 : count", "count", shows_in=COUNTS),
    Mutation("counts reach into the next group", _ROWS, "some < most ? some : most", "some", shows_in=COUNTS),
    Mutation("groups have all rows", _ROWS, "row + (some < most ? some : most)", "row + most", shows_in=COUNTS),
    Mutation("groups begin one row apart", _ROWS, "row = group * most", "row = group", shows_in=COUNTS),
    Mutation("a group has room for the rows of all", _ROWS, "most = p.m / p.num_groups", "most = p.m", shows_in=COUNTS),
    Mutation("scales of groups lie as rows do", _ROWS, "kScalesOfGroups = !kGroupsEnd", "kScalesOfGroups = false", shows_in=COUNTS),
    Mutation("scales of groups lie as far apart as blocks", "cast/scales_fp32.cuh", "uint64_t{group} * p.scales_stride_g", "uint64_t{group} * p.scales_stride_k", shows_in=COUNTS),
    # Ends
    Mutation("groups begin where the one before ended", _ROWS, "ceil_div(before < 0 ? 0 : before, p.alignment) * p.alignment", "before < 0 ? 0 : before", shows_in=ENDS),
    Mutation("beginnings rounded down", _ROWS, "ceil_div(before < 0 ? 0 : before, p.alignment)", "(before < 0 ? 0 : before) / p.alignment", shows_in=ENDS),
    Mutation("an end below zero lies behind all rows", _ROWS, "some = last < 0 ? 0 : last", "some = last", shows_in=ENDS),
    Mutation("a group begins behind all rows after an end below zero", _ROWS, "before < 0 ? 0 : before", "before", shows_in=ENDS),
    Mutation("the first group begins where another ended", _ROWS, "group == 0 ? 0 : ptx::ld_global_i32", "ptx::ld_global_i32", shows_in=ENDS),
    Mutation("groups begin where they end", _ROWS, "p.sizes + group - 1", "p.sizes + group", shows_in=ENDS),
    Mutation("ends reach behind the last row", _ROWS, "some < p.m ? some : p.m", "some", shows_in=ENDS),
    Mutation("groups that end before they begin", _ROWS, "row < end ? end : row", "end", shows_in=ENDS),
    # The last end
    Mutation("the first group's end", _UNTIL, "p.sizes + p.num_groups - 1", "p.sizes", shows_in=UNTIL),
    Mutation("an end below zero is behind all rows", _UNTIL, "some = last < 0 ? 0 : last", "some = last", shows_in=UNTIL),
    Mutation("an end reaches behind the last row", _UNTIL, "end = some < p.m ? some : p.m;", "end = some;", shows_in=UNTIL),
    Mutation("the last rows are no unit", _UNTIL, "num_units = ceil_div(end, kRows)", "num_units = end / kRows", shows_in=UNTIL),
    Mutation("the last unit is whole", _UNTIL, "Unit{i * kRows, end, 0}", "Unit{i * kRows, i * kRows + kRows, 0}", shows_in=UNTIL),
    # Counting units
    Mutation("threads count the same groups", _ROWS, "first = thread * kGroupsPerThread;", "first = thread;"),
    Mutation("a group too many", _ROWS, "if (group < p.num_groups)", "if (group <= p.num_groups)"),
    Mutation("the last rows of a group make no unit", _ROWS, "ceil_div(rows.end - rows.row, kRows)", "(rows.end - rows.row) / kRows"),
    Mutation("a thread counts its last group alone", _ROWS, "of_thread += units[i];", "of_thread = units[i];"),
    Mutation("neighbours alone are summed", _LANES, "ptx::shfl_sync(sum, lane - distance)", "ptx::shfl_sync(sum, lane - 1)"),
    Mutation("a warp's first sum for its last", _ROWS, "if (lane == 31)", "if (lane == 0)"),
    Mutation("all warps' sums at the first one's place", _ROWS, "&made.units_of_warp[thread / 32]", "&made.units_of_warp[0]"),
    Mutation("sums are read before all are there", _ROWS, "made.units_of_warp[thread / 32], sum);\n    ptx::syncthreads();\n", "made.units_of_warp[thread / 32], sum);\n"),
    Mutation("a thread's own units lie before it", _ROWS, "before = sum - of_thread;", "before = sum;"),
    Mutation("all warps lie before each", _ROWS, "before += warp < thread / 32 ? of_warp : 0;", "before += of_warp;"),
    Mutation("no warp lies before another", _ROWS, "before += warp < thread / 32 ? of_warp : 0;", ""),
    Mutation("units of the last warp", _ROWS, "num_units += of_warp;", "num_units = of_warp;"),
    Mutation("a thread's groups begin with the same unit", _ROWS, "      before += units[i];\n", ""),
    Mutation("units are looked up before all are there", _ROWS, "      before += units[i];\n    }\n    ptx::syncthreads();\n", "      before += units[i];\n    }\n"),
    # Finding a unit
    Mutation("units past the last are looked up", _ROWS, "    if (i >= num_units) return {0, 0, 0};\n", ""),
    Mutation("a group's first unit is the group's before", _ROWS, "first_unit[middle]) <= i", "first_unit[middle]) < i"),
    Mutation("the search ends with two groups", _ROWS, "while (above - group > 1)", "while (above - group > 2)"),
    Mutation("the last group is never found", _ROWS, "above = num_groups;", "above = num_groups - 1;"),
    Mutation("units counted from the first group's", _ROWS, "(i - ptx::ld_shared_b32(&shared.first_unit[group])) * kRows", "i * kRows"),
    Mutation("units of a group begin one row apart", _ROWS, "(i - ptx::ld_shared_b32(&shared.first_unit[group])) * kRows", "(i - ptx::ld_shared_b32(&shared.first_unit[group]))"),
    Mutation("a unit is always whole", _ROWS, "{row, ptx::ld_shared_b32(&shared.end[group]), ", "{row, row + kRows, "),
    Mutation("all groups begin with the first row", _ROWS, "&made.row[group], rows.row", "&made.row[group], 0"),
    # Dealing units to teams
    Mutation("a CTA takes one unit for each team", _KERNEL, "while (Rows::kIsShared && first < rows.num_units * blocks)", "while (false)"),
    Mutation("CTAs stop after as many blocks as there are units", _KERNEL, "first < rows.num_units * blocks", "first < rows.num_units"),
    Mutation("CTAs leave out every other share", _KERNEL, "first += ptx::grid_size() * kTeams;", "first += 2 * ptx::grid_size() * kTeams;"),
    Mutation("sizes are read before the kernel ahead has ended", _KERNEL, _WAIT + _MADE, _MADE + _WAIT),
]  # fmt: skip
