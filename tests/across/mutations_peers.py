"""Ways to break kernels that use peers' memory and the protocol of ranks' meetings, and the trials that must notice."""

from __future__ import annotations

import torch

from lab.sim.mutate import Mutation
from lab.sim.peers import AbsentTrial, PeerTrial
from lab.sim.rank_calls import Sizes

TWO = Sizes(((3, 2), (0, 4), (4, 1), (2, 3)))
WIDE = Sizes(((5, 6), (6, 0), (1, 5)), max_tokens=6, hidden=1040, topk=9, dtype=torch.float32, ids=torch.int32)
MANY = Sizes(((14, 3), (9, 14)), max_tokens=14, topk=34)
"""More tokens for each CTA than the CTA has warps, and more routes than a warp has lanes."""
THREE = Sizes(((2, 3, 1), (3, 0, 3), (1, 2, 2)), max_tokens=3, topk=2, dtype=torch.float16)
LONG = Sizes(((11, 8),), max_tokens=11, topk=2)
LARGE = Sizes(((2, 1),), max_tokens=2, hidden=4096 + 144, topk=2)
"""Rows that two warps copy, a part each."""
TRIALS = [
    *(PeerTrial(TWO, seed, name) for seed, name in ((1, None), (2, "slow_warps"), (3, "slow_cta"), (4, "late_stores"))),
    PeerTrial(WIDE, 5),
    *(PeerTrial(MANY, seed, name, num_sms=1) for seed, name in ((16, "late_stores"), (17, "slow_warps"))),
    *(PeerTrial(THREE, seed, name) for seed, name in ((6, None), (7, "slow_lanes"), (8, "late_stores"))),
    *(PeerTrial(TWO, seed, "slow_warps") for seed in range(9, 15)),
    *(PeerTrial(LONG, seed, name, num_sms=1) for seed, name in ((15, None), (16, "late_stores"))),
    PeerTrial(LARGE, 18),
    AbsentTrial(TWO, 20),
    AbsentTrial(THREE, 21),
    AbsentTrial(TWO, 22, launches=1),
    AbsentTrial(THREE, 23, launches=1),
]

_MEET, _POST, _GATHER, _LAST = "meeting.cuh", "post_rows.cuh", "gather_rows.cuh", "meet_ranks.cuh"
_IDS = "routes.cuh"
_CAST = "post/cast_token.cuh"
_COUNT = "ptx::atom_add_acq_rel_b32(m.reached + 1, 1)"
MEETING_MUTATIONS = [
    Mutation("the flag is an ordinary store", _MEET, "ptx::st_release_sys_b32(flag_of(m, thread, m.rank), epoch);", "ptx::st_global_b32(flag_of(m, thread, m.rank), epoch);"),
    Mutation("the count orders nothing", _MEET, _COUNT, _COUNT.replace("_acq_rel_b32", "")),
    Mutation("the count does not wait for the block", _MEET, "thread = ptx::thread_index();\n  ptx::syncthreads();\n  if (thread == 0) {", "thread = ptx::thread_index();\n  if (thread == 0) {"),
    Mutation("flags before the last has counted for others", _MEET, "  ptx::syncthreads();\n  if (ptx::ld_shared_b32(&shared.is_last)", "  if (ptx::ld_shared_b32(&shared.is_last)"),
    Mutation("the first block sets the flags", _MEET, "1) + 1 == ptx::grid_size()", "1) == 0"),
    Mutation("the epoch is not advanced", _MEET, "      ptx::st_global_b32(m.reached, epoch);\n", ""),
    Mutation("the count does not begin anew", _MEET, "      ptx::st_global_b32(m.reached + 1, 0);\n", ""),
    Mutation("the flag is loaded without acquire", _MEET, "ptx::ld_acquire_sys_b32(flag_of", "ptx::ld_global_b32(flag_of"),
    Mutation("nobody waits", _MEET, "thread)) - epoch) < 0)", "thread)) - epoch) < 0 && false)"),
    Mutation("a rank waits for the epoch before", _MEET, "thread)) - epoch) < 0)", "thread)) - epoch) < -1)"),
    Mutation("a rank flags itself alone", _MEET, "flag_of(m, thread, m.rank), epoch", "flag_of(m, m.rank, m.rank), epoch"),
    Mutation("a rank writes into another one's flag", _MEET, "flag_of(m, thread, m.rank), epoch", "flag_of(m, thread, thread), epoch"),
    Mutation("a rank waits for itself alone", _MEET, "flag_of(m, m.rank, thread)) - epoch", "flag_of(m, m.rank, m.rank)) - epoch"),
    Mutation("the last rank is neither told nor waited for", _MEET, "thread >= m.ranks) return", "thread >= m.ranks - 1) return"),
    Mutation("there is no limit", _MEET, "- start <= m.limit) continue", "- start <= m.limit || true) continue"),
    Mutation("the time is always over", _MEET, "- start <= m.limit) continue", "- start > m.limit) continue"),
    Mutation("the rank that waited is named", _MEET, "ptx::st_global_b32(m.report, thread + 1);", "ptx::st_global_b32(m.report, m.rank + 1);"),
    Mutation("the host is not told", _MEET, "    ptx::st_global_b32(m.report, thread + 1);\n", ""),
    Mutation("the rank forgets whom it missed", _MEET, "    ptx::st_global_b32(m.error, thread + 1);\n", ""),
    Mutation("a rank that missed another stores results", _GATHER, "p.addresses != nullptr && !is_whole(p.meeting)", "false"),
    Mutation("a rank that missed another meets again", _LAST, "if (is_whole(p.meeting)) meet", "meet"),
    Mutation("nobody waits for results", _LAST, "if (is_whole(p.meeting)) meet(p.meeting, shared.meeting);", ""),
    Mutation("a rank that missed another posts rows", _POST, "  if (!is_whole(m)) return post_nothing(p);\n", ""),
    Mutation("a rank that missed another sums up what it finds", _POST, "return post_nothing(p);", "return;"),
    Mutation("rows come behind their flag", _POST, "  uint32_t turn = 0;", "  meet(m, shared.meeting);\n#define meet(...)\n  uint32_t turn = 0;"),
]  # fmt: skip
POST_MUTATIONS = [
    Mutation("ids of routes elsewhere stay as they are", _POST, "      ptx::st_global_b32(m.rooms[r] + p.ids", "      if (is_here) ptx::st_global_b32(m.rooms[r] + p.ids"),
    Mutation("ids of tokens that are not there stay as they are", _POST, "token < p.max_tokens; token += ", "token < p.tokens; token += "),
    Mutation("ids are those of all ranks", _POST, "expert - r * p.experts_here : kNone", "expert : kNone"),
    Mutation("an expert is on every rank", _POST, "expert != kNoExpert && expert / p.experts_here == r", "expert != kNoExpert"),
    Mutation("an id that no expert has is one", _IDS, "id - first < count ? id - first : kNoExpert", "id - first"),
    Mutation("the upper half of an id is not looked at", _IDS, "words.y == 0 ? words.x : kNoExpert", "words.x"),
    Mutation("ids of 8 bytes read as if of 4", _IDS, "ids + at * 8", "ids + at * 4"),
    Mutation("ids of the first token", _POST, "uint64_t{token} * p.topk + j, 0, ", "j, 0, "),
    Mutation("ids of the first 32 routes alone", _POST, "j < p.topk; j += 32", "j < (p.topk < 32 ? p.topk : 32); j += 32"),
    Mutation("slots of the first rank", _POST, "uint64_t{m.rank} * p.max_tokens + token;", "token;"),
    Mutation("results are looked for at the token's first route", _POST, "? kNone : token * p.topk + j);", "? kNone : token * p.topk);"),
    Mutation("results of routes without an expert are looked for", _POST, "expert == kNoExpert ? kNone : token", "expert == kNoExpert ? token : token"),
    Mutation("no warp puts routes but the first", _POST, "turn = turn + 1 == kNumThreads / 32 ? 0 : turn + 1;", "turn = kNumThreads / 32;"),
    Mutation("rows lie in the first rank's room", _POST, "m.rooms[m.rank] + uint64_t{token} * p.row_bytes", "m.rooms[0] + uint64_t{token} * p.row_bytes"),
    Mutation("rows lie over each other", _POST, "m.rooms[m.rank] + uint64_t{token} * p.row_bytes", "m.rooms[m.rank]"),
    Mutation("rows of tokens that are not there", _POST, "if (token < p.tokens) put_token", "put_token"),
    Mutation("operands are read before the kernel ahead has ended", _POST, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("a team casts one block", _CAST, "first < blocks; first += kPieces * kTeams", "first < 1; first += kPieces * kTeams"),
    Mutation("the first pieces alone are cast", _CAST, "if (first + i * kTeams >= blocks) break;", "if (i > 0) break;"),
    Mutation("blocks past the last are cast", _CAST, "      if (block >= blocks) continue;\n", ""),
    Mutation("a scale of the block before", _CAST, "row + p.hidden + block * 4, casts[0].scale", "row + p.hidden + (block > 0 ? block - 1 : 0) * 4, casts[0].scale"),
    Mutation("scales behind columns of whole blocks", _CAST, "row + p.hidden + block * 4, casts[0].scale", "row + ceil_div(p.hidden, kBlock) * kBlock + block * 4, casts[0].scale"),
    Mutation("weights of the first token", _POST, "p.topk_weights + uint64_t{token} * p.topk + j", "p.topk_weights + j"),
    Mutation("weights lie over scales", _POST, "row + p.hidden + (blocks + j) * 4, weight", "row + p.hidden + j * 4, weight"),
    Mutation("the first token's columns", _CAST, "p.x + uint64_t{token} * p.x_pitch", "p.x"),
]  # fmt: skip
GATHER_MUTATIONS = [
    Mutation("values of the first slot", _MEET, "m.rooms[slot / max_tokens] + uint64_t{slot % max_tokens} * row_bytes", "m.rooms[slot / max_tokens]"),
    Mutation("values of the first rank", _MEET, "m.rooms[slot / max_tokens] + uint64_t", "m.rooms[0] + uint64_t"),
    Mutation("values at the slot's number among all", _MEET, "uint64_t{slot % max_tokens} * row_bytes", "uint64_t{slot} * row_bytes"),
    Mutation("routes of the first slot", _GATHER, "p.row_of + uint64_t{slot} * p.topk + route", "p.row_of + route"),
    Mutation("rows of routes without an expert", _GATHER, "ptx::ballot_sync(row >= 0)", "ptx::ballot_sync(true)"),
    Mutation("the first of a slot's rows alone", _GATHER, "for (uint32_t left = mask; left != 0; left &= left - 1) {", "for (uint32_t left = mask & -mask; left != 0; left &= left - 1) {"),
    Mutation("the last of a slot's rows is left out", _GATHER, "for (uint32_t left = mask; left != 0; left &= left - 1) {", "for (uint32_t left = mask; (left & (left - 1)) != 0; left &= left - 1) {"),
    Mutation("another lane's row", _GATHER, "lowest(left)", "lowest(left) + 1"),
    Mutation("columns past the last are copied", _GATHER, "if (first + i * 512 < p.hidden)\n        ptx::st", "if (true)\n        ptx::st"),
    Mutation("the first stretch alone is copied", _GATHER, "const uint32_t first = stretch * kColumns + lane * 16;", "const uint32_t first = lane * 16;"),
    Mutation("a stretch of each slot", _GATHER, "stretches = ceil_div(p.hidden, kColumns), of", "stretches = 1, of"),
    Mutation("each stretch is of another slot", _GATHER, "unit % stretches, ptx", "0, ptx"),
    Mutation("words of a piece swapped", _GATHER, "pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w", "pieces[i].x, pieces[i].z, pieces[i].y, pieces[i].w"),
    Mutation("weights of the first route", _GATHER, "p.weights_at + route * 4", "p.weights_at"),
    Mutation("weights lie where scales do", _GATHER, "p.weights_at + route * 4", "p.scales_at + route * 4"),
    Mutation("a weight of the slot's number", _GATHER, "p.weights + row, ptx", "p.weights + route, ptx"),
    Mutation("results go to the first rank", _MEET, "reinterpret_cast<uint64_t>(m.rooms[slot / max_tokens])", "reinterpret_cast<uint64_t>(m.rooms[0])"),
    Mutation("results go to this rank", _MEET, "reinterpret_cast<uint64_t>(m.rooms[slot / max_tokens])", "reinterpret_cast<uint64_t>(m.rooms[m.rank])"),
    Mutation("results lie at the slot's number", _MEET, "uint64_t{slot % max_tokens} * topk", "uint64_t{slot} * topk"),
    Mutation("results of a token's routes lie over each other", _MEET, "* topk + route) * columns", "* topk) * columns"),
    Mutation("results of FP8", _MEET, "* columns * 2;", "* columns;"),
    Mutation("half an address", _MEET, "static_cast<uint32_t>(address >> 32)", "0"),
    Mutation("scales of the first slot", _GATHER, "slot_at(p, slot) + p.scales_at", "slot_at(p, 0) + p.scales_at"),
    Mutation("scales of the first block", _GATHER, "p.scales_at + block * 4", "p.scales_at"),
    Mutation("scales of another row", _GATHER, "ptx::shfl_sync(static_cast<uint32_t>(slot_of_lane), i)", "ptx::shfl_sync(static_cast<uint32_t>(slot_of_lane), i ^ 1)"),
    Mutation("scales are read before they are all there", _GATHER, "  ptx::syncthreads();\n  if (slot_of_lane < 0) return;", "  if (slot_of_lane < 0) return;"),
    Mutation("scales of rows without a token", _GATHER, "  if (slot_of_lane < 0) return;\n", ""),
    Mutation("scales of blocks lie over each other", _GATHER, "uint64_t{block} * p.pitch + first_row", "first_row"),
    Mutation("rows of the first CTA of scales", _GATHER, "(ptx::block_index() - of_values) * kRows", "0"),
    Mutation("slots past the last", _GATHER, "if (slot < p.num_slots) gather_slot", "gather_slot"),
    Mutation("a slot for each CTA", _GATHER, "ptx::block_index() * kWarps + ptx::warp_index(), slot", "ptx::block_index(), slot"),
    Mutation("operands are read before the kernel ahead has ended", _GATHER, "  ptx::griddepcontrol_wait();\n", ""),
]  # fmt: skip
