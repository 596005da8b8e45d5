"""Ways to break the kernels of rows that collectives send, and the trials that must notice."""

from __future__ import annotations

import torch

from deep_gemm.across.pack_rows import PackConfig
from deep_gemm.across.plan_sends import PlanSendsConfig
from lab.sim.mutate import Mutation
from lab.sim.pack_rows import PackTrial
from lab.sim.plan_sends import PlanTrial

INT32, INT64 = PlanSendsConfig(4), PlanSendsConfig(8)
PLAN_TRIALS = [
    *(PlanTrial(INT32, 150, 9, 3, 5, seed, name) for seed, name in ((1, None), (2, "slow_warps"), (3, "slow_cta"))),
    *(PlanTrial(INT64, 70, 3, 2, 34, seed, name) for seed, name in ((4, None), (5, "slow_lanes"))),
    PlanTrial(INT32, 1100, 2, 2, 3, 6),
    PlanTrial(INT32, 2060, 2, 2, 3, 7, "slow_warps"),
]
BF16, FP32 = PackConfig(torch.bfloat16, 8, num_threads=64), PackConfig(torch.float32, 4, num_threads=64)
PACK_TRIALS = [
    PackTrial(BF16, 5, 144, 3, 1),
    PackTrial(FP32, 3, 272, 5, 2, schedule="slow_warps"),
    PackTrial(BF16, 3, 1040, 9, 3, behind=2),
    PackTrial(FP32, 2, 144, 20, 4, behind=0),
]

_PLAN, _PACK, _PIECE = "plan_sends.cuh", "pack_rows.cuh", "cast/piece.cuh"
PLAN_MUTATIONS = [
    Mutation("routes past the last are read", _PLAN, "first + i < p.topk ? load_expert", "true ? load_expert"),
    Mutation("eight routes at most", _PLAN, "first < p.topk && token", "first < 1 && token"),
    Mutation("tokens behind the last are planned", _PLAN, "first < p.topk && token < p.tokens; first", "first < p.topk; first"),
    Mutation("a token goes to its last expert's rank", _PLAN, "ranks |= uint64_t{1} << rank;", "ranks = uint64_t{1} << rank;"),
    Mutation("32 ranks at most", _PLAN, "ranks |= uint64_t{1} << rank;", "ranks |= uint64_t{1} << rank % 32;", shows_in=INT64),
    Mutation("an id that no expert has is one", _PLAN, "0, p.experts_here * p.ranks)", "0, 1u << 31)"),
    Mutation("experts of one rank", _PLAN, "0, p.experts_here * p.ranks)", "0, p.experts_here)"),
    Mutation("routes are not counted", _PLAN, "if (routes != nullptr) ptx::red", "if (false) ptx::red"),
    Mutation("routes are counted again where rows are given", _PLAN, "ranks_of(p, token, nullptr)", "ranks_of(p, token, shared.routes)"),
    Mutation("the first tokens alone are counted", _PLAN, "first < p.tokens; first += kNumThreads", "first < p.tokens && first < kNumThreads; first += kNumThreads"),
    Mutation("warps count the same tokens", _PLAN, "first = ptx::warp_index() * 32;", "first = 0;"),
    Mutation("each lane counts for its warp", _PLAN, "if (count == 0 || ptx::lane_index() != 0) continue;", "if (count == 0) continue;"),
    Mutation("tokens of this CTA count as before it", _PLAN, "if (first < first_of_cta) ptx", "if (first < first_of_cta + kNumThreads) ptx"),
    Mutation("tokens before this CTA are forgotten", _PLAN, "if (first < first_of_cta) ptx", "if (false) ptx"),
    Mutation("totals begin as they are", _PLAN, "    ptx::st_shared_b32(&shared.total[thread], 0);\n", ""),
    Mutation("counters of the CTAs before begin as they are", _PLAN, "    ptx::st_shared_b32(&shared.before[thread], 0);\n", ""),
    Mutation("counters of routes begin as they are", _PLAN, "    ptx::st_shared_b32(&shared.routes[thread], 0);\n", ""),
    Mutation("counting begins before the counters are zero", _PLAN, "  }\n  ptx::syncthreads();\n\n  ptx::griddepcontrol_wait();", "  }\n\n  ptx::griddepcontrol_wait();"),
    Mutation("ids are read before the kernel ahead has ended", _PLAN, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("rows are counted before all have counted", _PLAN, "  ptx::syncthreads();\n\n  if (thread < p.ranks) {\n    uint32_t row", "\n  if (thread < p.ranks) {\n    uint32_t row"),
    Mutation("a rank starts where it ends", _PLAN, "rank < thread; ++rank) row", "rank <= thread; ++rank) row"),
    Mutation("all ranks start at the first row", _PLAN, "rank < thread; ++rank) row", "rank < 0; ++rank) row"),
    Mutation("warps of a CTA begin at one row", _PLAN, "      row += count;\n", ""),
    Mutation("rows are told as routes", _PLAN, "ptx::ld_shared_b32(&shared.routes[thread]));", "ptx::ld_shared_b32(&shared.total[thread]));"),
    Mutation("the upper half of a fact is lost", _PLAN, "static_cast<uint32_t>(number >> 32)", "0u"),
    Mutation("a fact is not told", _PLAN, "thread < kNumFacts) tell", "thread < kNumFacts - 1) tell"),
    Mutation("routes are told over rows", _PLAN, "kNumFacts + p.ranks + thread", "kNumFacts + p.ranks - 1 + thread"),
    Mutation("rows are given before warps know where", _PLAN, "  ptx::syncthreads();\n\n  uint32_t column", "\n  uint32_t column"),
    Mutation("lanes above count as before", _PLAN, "ptx::popc(lanes & ((1u << lane) - 1))", "ptx::popc(lanes >> lane >> 1)"),
    Mutation("all rows in one column", _PLAN, "    ++column;\n", ""),
    Mutation("columns behind the last row stay as they are", _PLAN, "  for (; column < p.topk; ++column)", "  for (; column < 0; ++column)"),
    Mutation("tokens behind the last have no rows", _PLAN, "  if (token >= p.tokens) return;\n", ""),
    Mutation("all tokens have the rows of the first", _PLAN, "p.row_of + uint64_t{token} * p.topk", "p.row_of"),
]  # fmt: skip
PACK_MUTATIONS = [
    Mutation("every token has its own row", _PACK, "if (p.row_of == nullptr) return store", "if (true) return store"),
    Mutation("a token has one row", _PACK, "    store(p.rows + static_cast<uint64_t>(row) * p.row_bytes);\n", "    store(p.rows + static_cast<uint64_t>(row) * p.row_bytes);\n    return;\n"),
    Mutation("rows of the first token", _PACK, "p.row_of + uint64_t{token} * p.topk + j", "p.row_of + j"),
    Mutation("columns without a row have the first one", _PACK, "    if (row < 0) return;\n", "    if (row < 0) return store(p.rows);\n"),
    Mutation("ids of the first token", _PACK, "first_route = uint64_t{token} * p.topk", "first_route = 0"),
    Mutation("weights before ids", _PACK, "if (i < p.topk) return is_there ? load_expert(p.topk_ids, first_route + i, 0, kMaxIds)", "if (i >= p.topk && i < 2 * p.topk) return is_there ? load_expert(p.topk_ids, first_route + i - p.topk, 0, kMaxIds)"),
    Mutation("routes of tokens that are not there", _PACK, "is_there = token < p.tokens;", "is_there = true;", shows_in=BF16),
    Mutation("rows behind the last are to the first expert", _PACK, ": kNoExpert;\n  return is_there && i", ": 0;\n  return is_there && i", shows_in=BF16),
    Mutation("words behind the weights stay as they are", _PACK, "i < (p.row_bytes - routes) / 4;", "i < 2 * p.topk;"),
    Mutation("the first lane writes all that it writes of routes", _PACK, "i < (p.row_bytes - routes) / 4; i += kLanes", "i < (p.row_bytes - routes) / 4 && i < kLanes; i += kLanes"),
    Mutation("routes lie behind whole blocks", _PACK, "routes = p.hidden + blocks * 4;", "routes = blocks * kBlock + blocks * 4;"),
    Mutation("scales lie behind whole blocks", _PACK, "row + p.hidden + at.block * 4, casts[0].scale", "row + blocks * kBlock + at.block * 4, casts[0].scale"),
    Mutation("one scale of a token", _PACK, "row + p.hidden + at.block * 4, casts[0].scale", "row + p.hidden, casts[0].scale"),
    Mutation("columns past the last are written", _PACK, "store_values(row, at.block * kBlock, p.hidden,", "store_values(row, at.block * kBlock, blocks * kBlock,"),
    Mutation("values of the first block", _PACK, "store_values(row, at.block * kBlock,", "store_values(row, 0,"),
    Mutation("the first token's columns", _PACK, "p.x + uint64_t{token} * p.x_pitch", "p.x"),
    Mutation("a token has no unit for its routes", _PACK, "blocks + 1, p.unit_reciprocal", "blocks, p.unit_reciprocal"),
    Mutation("teams past the last token cast", _PACK, "is_cast = token < p.tokens && at", "is_cast = at"),
    Mutation("the first slots alone get routes", _PACK, "at.block == blocks && token < p.slots", "at.block == blocks && token < p.tokens", shows_in=BF16),
    Mutation("operands are read before the kernel ahead has ended", _PACK, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("every block is taken for ordinary", _PIECE, "  if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return cast_pieces<kCount, false>(pieces, lane, casts);\n", ""),
]  # fmt: skip
