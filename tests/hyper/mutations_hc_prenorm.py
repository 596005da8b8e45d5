"""Mistakes in the kernels of hyper-connections, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.hyper.kernel import HcConfig
from deep_gemm.hyper.kernel_few import HcFewConfig
from lab.sim.hc_prenorm import HcFewTrial, HcTrial
from lab.sim.mutate import Mutation

ALONE, PAIR = HcConfig(64, 24, 1, 2, max_stages=4), HcConfig(128, 16, 2, 3, max_stages=3)
FEW_ROWS, MANY_TEAMS = HcConfig(64, 8, 3, 1, max_stages=2), HcConfig(64, 8, 2, 4, max_stages=4)
TRIALS = [
    HcTrial(ALONE, 137, 24, 512, 3, 0, num_sms=2),
    HcTrial(FEW_ROWS, 70, 24, 448, 2, 1, num_sms=3),
    HcTrial(PAIR, 300, 16, 384, 2, 8, "slow_lanes", num_sms=2),
    HcTrial(ALONE, 13, 24, 192, 1, 3, is_special=True, num_sms=2),
    HcTrial(MANY_TEAMS, 70, 16, 1152, 2, 9, "slow_warps", num_sms=2),
    HcTrial(ALONE, 70, 24, 448, 5, 5, num_sms=2),
    HcTrial(ALONE, 70, 24, 1024, 1, 5, "slow_math", num_sms=2),
    HcTrial(ALONE, 70, 24, 1024, 1, 4, "late_loads", num_sms=2),
    HcTrial(FEW_ROWS, 137, 24, 448, 1, 6, "slow_cta", num_sms=3),
    HcTrial(FEW_ROWS, 137, 24, 448, 1, 7, "slow_warps", num_sms=3),
    HcTrial(FEW_ROWS, 5, 8, 64, 1, 2, "slow_cta", num_sms=3),  # CTAs without a block send their sums at once
    HcTrial(FEW_ROWS, 5, 8, 64, 1, 0, "slow_warps", num_sms=3),
    HcTrial(ALONE, 5, 24, 64, 3, 0, "slow_producer", num_sms=2),  # splits without a block are written at once
]

_K, _PART = "hc_prenorm.cuh", "types.cuh"

MUTATIONS = [
    # the ring, and the split of B into high and low parts
    Mutation("slots are not waited for", _K, "      wait_until_free(shared.ring, at);\n", ""),
    Mutation("one box is announced", _K, "expect_tx(full, p.slot_bytes)", "expect_tx(full, p.slot_bytes / 2)"),
    Mutation("B is split before it has come", _K, "    wait_until_loaded(shared.ring, slot);\n", ""),
    Mutation("B is multiplied before it is split", _K, "    ptx::bar_sync(1 + team, kTeamThreads);\n", ""),
    Mutation("the tensor cores may read old bytes", _K, "    ptx::fence_proxy_async_shared();", "    "),
    Mutation("teams meet at one barrier", _K, "ptx::bar_sync(1 + team, ", "ptx::bar_sync(1, "),
    Mutation("all teams take the same k-blocks", _K, "unit.k_block + team; k_block", "unit.k_block; k_block"),
    Mutation("teams walk through all stages", _K, "stage + kTeams, parity", "stage + 1, parity"),
    Mutation("turns without a k-block are not announced", _K, "        ptx::mbarrier_arrive(full);\n", ""),
    Mutation("turns without a k-block are not given back", _K, "      release(shared.ring, slot, lane);\n", ""),
    Mutation("lanes miss a phase", _K, "      ptx::syncwarp();  // all lanes have seen this phase, which the release may end\n", ""),
    Mutation("a unit's turns end with its k-blocks", _K, "return k_block + ceil_div(end_k_block - k_block, kTeams) * kTeams;", "return end_k_block;"),
    Mutation("teams send in the name of one", _K, "units.rank * kTeams + team, 0,", "units.rank * kTeams, 0,"),
    Mutation("rows are overwritten before all are read", _K, "  ptx::syncwarp();\n#pragma unroll\n  for (uint32_t i = 0; i < kSteps; ++i) {\n    const", "#pragma unroll\n  for (uint32_t i = 0; i < kSteps; ++i) {\n    const"),
    Mutation("registers are not fenced", _K, "    ptx::wgmma_fence();\n", ""),
    Mutation("slots are not given back", _K, "    release(shared.ring, slot, lane, loaded);\n", ""),
    Mutation("slots are given back before the products are done", _K, "    ptx::fence_registers(products);\n    ptx::wgmma_wait_group<0>();\n    release(shared.ring, slot, lane, loaded);", "    release(shared.ring, slot, lane, loaded);\n    ptx::fence_registers(products);\n    ptx::wgmma_wait_group<0>();"),
    Mutation("products are not waited for", _K, "    ptx::wgmma_wait_group<0>();\n", ""),
    # numbers
    Mutation("B is cut off", _K, "(bits + 0xfff + (bits >> 13 & 1))", "(bits)"),
    Mutation("the middle is rounded away from zero", _K, "(bits + 0xfff + (bits >> 13 & 1))", "(bits + 0x1000)"),
    Mutation("B is not rounded", _K, "& ~0x1fffu;", ";"),
    Mutation("a NaN is rounded", _K, "== ptx::float_of(bits) ? nearest : bits", "== ptx::float_of(bits) ? nearest : nearest"),
    Mutation("zero has a predecessor", _K, "(value == 0 ? rounded : rounded - 1)", "(rounded - 1)"),
    Mutation("the low part may be zero", _K, "(value == 0 ? rounded : rounded - 1)", "(rounded)"),
    Mutation("the low part is left out", _K, "products[i * 2] + products[i * 2 + 1]", "products[i * 2]"),
    Mutation("high and low are one row", _K, "b + (row + 1) * kRowBytes", "b + row * kRowBytes"),
    Mutation("the low part is swizzled as the high one", _K, "(column / 2 ^ (row + 1) % 8)", "(column / 2 ^ row % 8)"),
    # squares
    Mutation("a chunk is squared twice", _K, "^ i * 64)", "^ i * 0)"),
    Mutation("rows of squares are 4 apart", _K, "(address + row * 8 * kRowBytes)", "(address + row * 4 * kRowBytes)"),
    Mutation("half of a row's squares", _K, "  return sum + ptx::shfl_sync(sum, lane ^ 2);", "  return sum;"),
    Mutation("the second warpgroup has the first's rows", _K, "shared.a[0]) + warp * 16 * kRowBytes", "shared.a[0]) + warp % 4 * 16 * kRowBytes"),
    Mutation("the second warpgroup multiplies the first's rows", _K, "+ warp / 4 * 64 * kRowBytes", ""),
    # shares of CTAs, and adding up their sums
    Mutation("a split is its whole blocks", _PART, "count = each + (index < more ? 1 : 0);", "count = each;"),
    Mutation("later splits are the longer ones", _PART, "first = index * each + (index < more ? index : more);", "first = index * each;"),
    Mutation("the sums before have not been taken", _K, "  if (kClusterK > 1 && number > 0) ptx::mbarrier_wait_parity_cluster(&shared.taken, (number & 1) ^ 1);\n", ""),
    Mutation("sums are added up before they have come", _K, "    ptx::mbarrier_wait_parity_cluster(&shared.received, number & 1);\n", "    ;\n"),
    Mutation("sums of a CTA alone are added up before all are there", _K, "  else\n    ptx::bar_sync(kTeams + 1, kTeamWarps * 32);\n", ""),
    Mutation("sums are given back before all have read them", _K, "  ptx::bar_sync(kTeams + 1, kTeamWarps * 32);\n  if (kClusterK > 1 && ptx", "  if (kClusterK > 1 && ptx"),
    Mutation("more sums are not expected", _K, "    expect_chunks<kSums, kSenders>(&shared.received, units.rank);\n#pragma", "#pragma"),
    Mutation("one CTA gives back for all", _K, "rank < kClusterK; ++rank) ptx::mbarrier_arrive_cluster", "rank < 1; ++rank) ptx::mbarrier_arrive_cluster"),
    Mutation("the kernel ahead may still write the operands", _K, "  if (ptx::elect_sync()) {\n    ptx::griddepcontrol_wait();", "  if (ptx::elect_sync()) {"),
    Mutation("the kernel ahead may still read the outputs", _K, "    ptx::griddepcontrol_wait();\n    multiply_units", "    multiply_units"),
    Mutation("peers may not run yet", _K, "if (kClusterK > 1 && number == 0) ptx::cluster_wait();", ""),
    Mutation("all CTAs of a cluster have the same blocks", _K, "of_split.first + of_rank.first;", "of_split.first;"),
    Mutation("the last sums are given back too", _K, "  if (is_last) return;", "  if (false) return;"),
    # stores
    Mutation("rows past the last are written", _K, "has_row = row < p.m,", "has_row = true,"),
    Mutation("rows past the last are written, 8 on", _K, "has_next = row + 8 < p.m;", "has_next = true;"),
    Mutation("columns of a quad change places", _K, "st_global_f32(to, x), ptx::st_global_f32(to + 4, z)", "st_global_f32(to, z), ptx::st_global_f32(to + 4, x)"),
    Mutation("all splits write the first's sums", _K, "p.d + unit.split * p.d_stride + row", "p.d + row"),
    Mutation("all splits write the first's squares", _K, "static_cast<uint64_t>(unit.split) * p.m + row", "row"),
]  # fmt: skip


_FEW, _ONE = HcFewConfig(24, 3, 4, 2), HcFewConfig(8, 1, 2, 3)
FEW_TRIALS = [
    HcFewTrial(_FEW, 37, 24, 1280, 2, 0, num_sms=3),
    HcFewTrial(_ONE, 13, 16, 1280, 3, 1, num_sms=2),
    HcFewTrial(_FEW, 13, 24, 192, 1, 3, is_special=True, num_sms=3),
    HcFewTrial(_FEW, 20, 24, 448, 1, 2, "slow_cta", num_sms=3),
    HcFewTrial(_FEW, 20, 24, 448, 1, 4, "slow_warps", num_sms=3),
    HcFewTrial(_FEW, 5, 24, 64, 1, 5, "slow_cta", num_sms=3),  # CTAs without a step send their sums at once
    HcFewTrial(HcFewConfig(8, 4, 1, 1), 5, 8, 64, 1, 6, "slow_lanes", num_sms=4),  # CTAs that receive nothing
]

_F = "hc_prenorm_few.cuh"

FEW_MUTATIONS = [
    # rows, columns and steps of lanes and warps
    Mutation("rows of A end at the tile", _F, "(row < p.m ? row : p.m - 1) * p.a_pitch", "row * p.a_pitch"),
    Mutation("both rows of A are the first", _F, "work.row_m + g + i * 8;", "work.row_m + g;"),
    Mutation("lanes of a quad have the same numbers of A", _F, "* p.a_pitch + t * 16;", "* p.a_pitch;"),
    Mutation("lanes of a quad have the same numbers of B", _F, "* p.b_pitch + t * 32;", "* p.b_pitch;"),
    Mutation("all columns are the first eight", _F, "source.b + eight * source.next_b +", "source.b +"),
    Mutation("B's second half is the first", _F, "* (kStep * 4) + i * 16);", "* (kStep * 4));"),
    Mutation("columns of the first tile", _F, "p.b + (work.row_n + g) * p.b_pitch", "p.b + g * p.b_pitch"),
    Mutation("a step is a block", _F, "kStepsOfBlock = 2,", "kStepsOfBlock = 1,"),
    Mutation("all CTAs of a cluster have the same steps", _F, "+ of_rank.first;", ";"),
    Mutation("all warps have the same steps", _F, "first = work.step + warp; first", "first = work.step; first"),
    Mutation("steps begin with another warp's", _F, "steps[i].load(source, work.step + warp + i * kWarps);", "steps[i].load(source, work.step + i * kWarps);"),
    Mutation("steps under way are the last ones again", _F, "next = step + kAhead * kWarps;", "next = step;"),
    Mutation("steps behind the last are multiplied", _F, "      if (step >= work.end_step) break;\n", ""),
    # numbers
    Mutation("B is cut off", _F, "bits + 0xfff + (bits >> 13 & 1);", "bits;"),
    Mutation("the middle is rounded away from zero", _F, "bits + 0xfff + (bits >> 13 & 1);", "bits + 0x1000;"),
    Mutation("a NaN is rounded", _F, "? nearest : 0x7fffffffu;", "? nearest : nearest;"),
    Mutation("numbers of B change places", _F, "nearest_tf32(j % 2 ? half.w : half.y)", "nearest_tf32(j % 2 ? half.y : half.w)"),
    Mutation("rows of A change places", _F, "a[0][0], a[1][0], a[0][1], a[1][1],", "a[1][0], a[0][0], a[1][1], a[0][1],"),
    Mutation("squares of one half", _F, "squares[row][0] + squares[row][1];", "squares[row][0];"),
    Mutation("squares of a lane's numbers alone", _F, "return sum + ptx::shfl_xor_sync(sum, 2);", "return sum;"),
    # adding up
    Mutation("warps are not waited for", _F, "  ptx::syncthreads();\n\n#pragma", "\n#pragma"),
    Mutation("one warp's sums", _F, "warp = 1; warp < kWarps; ++warp)", "warp = 1; warp < 1; ++warp)"),
    Mutation("peers may not run yet", _F, "  if constexpr (kClusterK > 1) ptx::cluster_wait();\n", ""),
    Mutation("sums are added up before they have come", _F, "    ptx::mbarrier_wait_parity_cluster(&shared.received, 0);\n", ""),
    Mutation("all CTAs store the first's chunks", _F, "rank * chunks_per_cta(kSums) + i, lane,", "i, lane,"),
    Mutation("the kernel ahead is not waited for", _F, "  ptx::griddepcontrol_wait();\n", ""),
    # stores
    Mutation("rows past the last are written", _F, "has_row = row < p.m,", "has_row = true,"),
    Mutation("rows past the last are written, 8 on", _F, "has_next = row + 8 < p.m;", "has_next = true;"),
    Mutation("squares of each tile of columns", _F, "is_mine = work.row_n == 0 && lane % 4 == 0;", "is_mine = work.row_n != 0 && lane % 4 == 0;"),
    Mutation("columns of a pair change places", _F, "st_global_f32(to, sum.x), ptx::st_global_f32(to + 1, sum.y)", "st_global_f32(to, sum.y), ptx::st_global_f32(to + 1, sum.x)"),
    Mutation("all splits write the first's sums", _F, "p.d + work.split * p.d_stride + row", "p.d + row"),
    Mutation("all splits write the first's squares", _F, "static_cast<uint64_t>(work.split) * p.m + row", "row"),
]  # fmt: skip
