"""Mistakes in linear_decode's own code and in its cast of the operand, and the trials that must notice them.

The lists of fp8_gemm_decode and of the casts break the code that linear_decode shares with these kernels.
"""

from __future__ import annotations

import torch

from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.linear.kernel import LinearDecodeConfig
from lab.sim.linear_decode import LinearTrial as Trial
from lab.sim.mutate import Mutation

PAIR = LinearDecodeConfig(DecodeConfig(8, 3, 1), 2)
FOUR = LinearDecodeConfig(DecodeConfig(16, 3, 2, with_c=True), 4)
SPLIT = LinearDecodeConfig(DecodeConfig(8, 3, 1, 3), 1)
BOTH = LinearDecodeConfig(DecodeConfig(16, 3, 1, 2), 2)

TRIALS = [
    *(Trial(PAIR, 7, 136, 8336, seed) for seed in (1, 2)),
    *(Trial(PAIR, 8, 72, 8336, 3, name) for name in ("slow_warps", "slow_lanes", "late_loads", "slow_producer")),
    *(Trial(PAIR, 8, 128, 8336, seed, "slow_cta") for seed in (4, 5, 6)),
    *(Trial(PAIR, 8, 128, 8336, seed, "late_stores") for seed in (4, 5)),
    *(Trial(PAIR, 8, 128, 1168, seed, "slow_cta", is_dependent=False) for seed in (6, 7)),
    Trial(PAIR, 7, 72, 656, 8, special=(torch.inf, torch.nan, 1e-40, 3e38)),
    Trial(PAIR, 3, 40, 16, 9),
    *(Trial(FOUR, 13, 600, 4240, seed) for seed in (10, 11)),
    Trial(FOUR, 16, 1000, 3216, 12, "slow_math"),
    *(Trial(SPLIT, 5, 136, 12304, seed, name) for seed, name in ((13, None), (14, "slow_cta"), (15, "slow_warps"))),
    Trial(SPLIT, 5, 72, 144, 16),
    *(Trial(BOTH, 13, 200, 8336, seed) for seed in (17, 18)),
    Trial(BOTH, 16, 200, 8336, 19, "slow_cta"),
]

WHOLE_PAIR = LinearDecodeConfig(DecodeConfig(8, 3, 1, sfa=WHOLE, sfb=WHOLE), 2)
WHOLE_FOUR = LinearDecodeConfig(DecodeConfig(16, 3, 2, with_c=True, c_is_fp32=True, sfa=WHOLE, sfb=WHOLE), 4)
WHOLE_SPLIT = LinearDecodeConfig(DecodeConfig(8, 3, 1, 3, sfa=WHOLE, sfb=WHOLE), 1)
WHOLE_BOTH = LinearDecodeConfig(DecodeConfig(16, 3, 1, 2, sfa=WHOLE, sfb=WHOLE), 2)

WHOLE_TRIALS = [
    Trial(WHOLE_PAIR, 7, 136, 4240, 1),
    Trial(WHOLE_PAIR, 1, 72, 2192, 2),
    *(Trial(WHOLE_PAIR, 3, 72, 656, seed, special=(torch.inf, torch.nan, 1e-40, 3e38)) for seed in (3, 4)),
    *(Trial(WHOLE_PAIR, 2, 128, 1168, 5, name) for name in ("slow_cta", "late_loads", "late_stores", "slow_lanes")),
    *(Trial(WHOLE_FOUR, m, 600, 4240, 6) for m in (13, 9)),
    *(Trial(WHOLE_SPLIT, 5, 136, 4112, seed, name) for seed, name in ((7, None), (8, "slow_cta"), (9, "slow_warps"))),
    Trial(WHOLE_BOTH, 16, 200, 4240, 10),
    Trial(WHOLE_BOTH, 4, 200, 528, 11, "slow_math"),
]

_KERNEL = "linear_decode.cuh"

MUTATIONS = [
    # The ring and the kernel ahead
    Mutation("slots are not waited for", _KERNEL, "    wait_until_free(shared.ring, at);\n", ""),
    Mutation("loaded before the kernel ahead has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("bytes of whole boxes announced", _KERNEL, "mbarrier_arrive_expect_tx(full, p.slot_bytes)", "mbarrier_arrive_expect_tx(full, kBBytes)"),
    Mutation("a CTA without a tile loads", _KERNEL, "if (has_tile(p, work) && ptx::elect_sync()) load_k_blocks", "if (ptx::elect_sync()) load_k_blocks"),
    Mutation("a CTA without a tile multiplies", _KERNEL, "    if (has_tile(p, work))\n", ""),
    # Blocks
    Mutation("columns past k are read", _KERNEL, "if (!is_there || column >= p.k) return;", "if (!is_there) return;"),
    Mutation("blocks past the group's are read", _KERNEL, "p, at.is_there(group), ", "p, true, "),
    Mutation("blocks past the group's are sent", _KERNEL, "      if (!at.is_there(group)) continue;\n", ""),
    Mutation("what is not loaded stays as it was", _KERNEL, "  to = {};\n", ""),
    Mutation("a group of all k-blocks that are left", _KERNEL, "count(work.end_k_block - first < kGroupKBlocks ? work.end_k_block - first : kGroupKBlocks)", "count(work.end_k_block - first)"),
    Mutation("a group of a k-block too many", _KERNEL, "count(work.end_k_block - first < kGroupKBlocks ? work.end_k_block - first : kGroupKBlocks)", "count(kGroupKBlocks)"),
    Mutation("quotients rounded down", _KERNEL, "((1 << 20) + count - 1) / count", "(1 << 20) / count"),
    Mutation("k-blocks counted from the first of all", _KERNEL, "at.token, group.k_block + at.k_block, lane", "at.token, at.k_block, lane"),
    Mutation("rows of x lie without gaps", _KERNEL, "(token) * p.x_pitch", "(token) * p.k * 2"),
    Mutation("each CTA casts the first CTA's share", _KERNEL, "/ kLanes) * kClusterN + work.place;", "/ kLanes) * kClusterN;"),
    Mutation("teams counted from the first thread", _KERNEL, "(ptx::thread_index() - kFirstCaster) / kLanes) *", "ptx::thread_index() / kLanes) *"),
    # The cast
    Mutation("a lane's neighbours left out of the largest", _KERNEL, "      amax = amax_of(largest_of_team(keys, lane))", "      amax = amax_of(keys[lane % kBlocksOfTeam])"),
    Mutation("all blocks count as ordinary", _KERNEL, "if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return false;", ""),
    Mutation("blocks that are not ordinary are left as they are", _KERNEL, " pieces.cast<false>(shared, work, group, room, lane, amax);", " {}"),
    Mutation("divided by the scale of another block", _KERNEL, ": first_of_team + i;", ": first_of_team;"),
    Mutation("divided by the scales of the other team", _KERNEL, "first_of_team = ptx::lane_index() / kLanes * kLanes", "first_of_team = 0"),
    Mutation("values not swizzled", _KERNEL, "(lane / 2 ^ token % 8)", "(lane / 2)"),
    Mutation("halves of a chunk swapped", _KERNEL, "+ lane % 2 * 8)", "+ (lane + 1) % 2 * 8)"),
    Mutation("values at the first k-block's place", _KERNEL, "shared.a[room][at.k_block] + offset", "shared.a[room][0] + offset"),
    Mutation("scales at another token's place", _KERNEL, "at.k_block * kBlockTokens + at.token], full", "at.k_block * kBlockTokens + (at.token ^ 1)], full"),
    Mutation("scales of A without B's", _KERNEL, "of_lane.scale * sfb", "of_lane.scale"),
    Mutation("scales of B of the group's first k-block", _KERNEL, "at.is_there(group) ? at.k_block : 0", "0"),
    Mutation("scales of B of this CTA's columns for all", _KERNEL, "(lane / kBlocksOfTeam - work.place) * kBlockN", "0"),
    Mutation("scales of B past the last column", _KERNEL, "(row_n < p.n ? row_n : p.n - 1) / 128", "row_n / 128"),
    Mutation("scales sent past the group's", _KERNEL, "if (place < kClusterN && at.is_there(group))", "if (place < kClusterN)"),
    Mutation("scales sent past the cluster", _KERNEL, "if (place < kClusterN && at.is_there(group))", "if (at.is_there(group))"),
    # The cluster
    Mutation("values sent to this CTA alone", _KERNEL, "ptx::st_async_v2_b32(to, full, rank_at(work, place)", "ptx::st_async_v2_b32(to, full, rank_at(work, work.place)"),
    Mutation("sent to the CTAs of another part of k", _KERNEL, "return place * kClusterK + work.rank;", "return place * kClusterK;"),
    Mutation("sent before the others run", _KERNEL, "    ptx::cluster_wait();  // all CTAs of the cluster run, and their barriers are initialized\n", ""),
    Mutation("given back before the others run", _KERNEL, "  } else {\n    ptx::cluster_wait();\n", "  } else {\n"),
    Mutation("sent into a room that is still read", _KERNEL, "    ptx::mbarrier_wait_parity(&shared.a_empty[room], (number / kRooms & 1) ^ 1);\n", ""),
    Mutation("rooms waited for a round too late", _KERNEL, "(number / kRooms & 1) ^ 1", "number / kRooms & 1"),
    Mutation("bytes announced before the room is free", _KERNEL, "    ptx::mbarrier_wait_parity(&shared.a_empty[room], (number / kRooms & 1) ^ 1);\n    // Other CTAs may send data before this arrival.\n    if (ptx::thread_index() == kFirstCaster) ptx::mbarrier_arrive_expect_tx(&shared.a_full[room], group.bytes());\n", "    if (ptx::thread_index() == kFirstCaster) ptx::mbarrier_arrive_expect_tx(&shared.a_full[room], group.bytes());\n    ptx::mbarrier_wait_parity(&shared.a_empty[room], (number / kRooms & 1) ^ 1);\n"),
    Mutation("scales' bytes not announced", _KERNEL, "(kWholeRows ? 0 : 4)", "0"),
    Mutation("multiplied before all is there", _KERNEL, "    ptx::mbarrier_wait_parity_cluster(&shared.a_full[room], number / kRooms & 1);\n", ""),
    Mutation("values not shown to WGMMA", _KERNEL, "    ptx::fence_proxy_async_shared();  // WGMMA reads bytes that threads have sent\n", ""),
    Mutation("rooms given back to this CTA alone", _KERNEL, "rank_at(work, ptx::lane_index()));", "rank_at(work, work.place));"),
    Mutation("rooms given back by one CTA for all", _KERNEL, "kClusterN * kNumMathWarps);", "kNumMathWarps);"),
    Mutation("rooms given back that nobody waits for", _KERNEL, "if (left > kRooms * kGroupKBlocks && ", "if ("),
    Mutation("the last room but one is not given back", _KERNEL, "if (left > kRooms * kGroupKBlocks && ", "if (left > (kRooms + 1) * kGroupKBlocks && "),
    # Groups
    Mutation("the next group is not loaded", _KERNEL, "    pieces.load(p, work, group, lane);\n  }\n}", "  }\n}"),
    Mutation("A of the next k-block", _KERNEL, "a_address + i * kABytes", "a_address + (i + 1) * kABytes"),
    Mutation("the last group is not cast", _KERNEL, "if (next >= work.end_k_block) break;", "if (next + kGroupKBlocks > work.end_k_block) break;"),
    Mutation("a CTA without k-blocks casts some", _KERNEL, "if (has_k_blocks) cast_groups", "cast_groups"),
]  # fmt: skip

WHOLE_MUTATIONS = [
    # The search
    Mutation("tokens past the last are searched", _KERNEL, "team % tokens < p.m && k_block", "k_block"),
    Mutation("each CTA searches the first CTA's share", _KERNEL, "(i * teams + team / tokens) * kClusterN + work.place", "(i * teams + team / tokens) * kClusterN"),
    Mutation("teams of a token search the same k-blocks", _KERNEL, "i * teams + team / tokens", "i * teams"),
    Mutation("only the first k-blocks are searched", _KERNEL, "next = first + kBlocksAtOnce * teams * kClusterN", "next = work.end_k_block"),
    Mutation("B follows each time", _KERNEL, "    if (next >= work.end_k_block) ptx::bar_arrive", "    ptx::bar_arrive"),
    Mutation("a lane's neighbours left out of a row's largest", _KERNEL, "const float amax = amax_of(largest_of_team(keys, lane))", "const float amax = amax_of(keys[0])"),
    Mutation("the third token has no team", _KERNEL, "p.m > 2 ? 4 : p.m", "p.m > 2 ? 2 : p.m"),
    # The exchange
    Mutation("largest sent before the others run", _KERNEL, "lane));\n  ptx::cluster_wait();  // all CTAs of the cluster run, and their barriers are initialized\n", "lane));\n"),
    Mutation("largest sent to another team's place", _KERNEL, "[team], &shared.amaxes_full", "[0], &shared.amaxes_full"),
    Mutation("largest sent to another CTA's place", _KERNEL, "amaxes[rank_at(work, work.place)]", "amaxes[work.place]"),
    Mutation("largest not waited for", _KERNEL, "  ptx::mbarrier_wait_parity_cluster(&shared.amaxes_full, 0);\n", ""),
    Mutation("fewer of the largest announced", _KERNEL, "sizeof(shared.amaxes)", "sizeof(shared.amaxes[0])"),
    Mutation("largest of the last CTA left out", _KERNEL, "cta < kClusterSize;", "cta < kClusterSize - 1;"),
    Mutation("halves of a warp not compared", _KERNEL, "distance < 32; distance *= 2", "distance < 16; distance *= 2"),
    Mutation("teams of a token not compared", _KERNEL, "distance = num_sought(p)", "distance = kCastTeams"),
    # The cast and the totals
    Mutation("divided by the scale of the block's number", _KERNEL, "kWholeRows ? at.token % kBlockTokens", "kWholeRows ? first_of_team + i"),
    Mutation("bytes of scales announced that are not sent", _KERNEL, "(kWholeRows ? 0 : 4)", "4"),
    Mutation("totals not scaled", _KERNEL, "  if constexpr (kWholeRows) multiply_by_scales(total, of_tokens, of_rows);\n", ""),
    Mutation("totals scaled by the first warp's rows of B", _KERNEL, "work.row_n + ptx::warp_index() * 16 +", "work.row_n +"),
    Mutation("partial sums scaled too", _KERNEL, "multiply_k_blocks<!kWholeRows>", "multiply_k_blocks<true>"),
]  # fmt: skip
