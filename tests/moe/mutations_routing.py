"""Mutations of the kernels that sort routes by expert and sum up tokens' rows, and the trials that must notice them."""

from __future__ import annotations

import torch

from deep_gemm.moe import gather_weighted
from deep_gemm.moe.gather_weighted import GatherConfig, ManyConfig
from deep_gemm.moe.route_rows import RouteConfig, Totals
from lab.sim.gather_weighted import GatherTrial, ManyTrial
from lab.sim.mutate import Mutation
from lab.sim.route_rows import RouteTrial

INT32, INT64 = RouteConfig(4, 64), RouteConfig(8, 64)
BY_PARTS, BY_PARTS_64 = (RouteConfig(id_bytes, 64, Totals.OF_PARTS) for id_bytes in (4, 8))
MOST = RouteConfig(4, 1024, Totals.OF_PARTS)
ROUTE_TRIALS = [
    *(RouteTrial(INT32, 150, 8, 40, seed, name) for seed, name in ((1, None), (2, "slow_warps"), (3, "slow_cta"))),
    *(RouteTrial(INT64, 130, 8, 33, seed, name) for seed, name in ((4, None), (5, "slow_lanes"))),
    RouteTrial(INT32, 7, 3, 64, 6),
    RouteTrial(INT32, 1100, 8, 5, 7),
    RouteTrial(INT32, 300, 5, 12, 8, first=12),
    RouteTrial(INT64, 40, 5, 12, 9, first=12),
    *(RouteTrial(BY_PARTS, 410, 8, 40, seed, how) for seed, how in ((10, None), (11, "slow_warps"), (12, "slow_cta"))),
    RouteTrial(BY_PARTS_64, 300, 5, 12, 13, first=12),
    RouteTrial(MOST, 4352, 4, 1000, 14),
]
FP32, BF16, FP16, ALIKE = (GatherConfig(dtype) for dtype in gather_weighted.WEIGHTS)
RING, RING_FP16 = (ManyConfig(dtype, num_stages=3, num_math_warps=2) for dtype in (torch.float32, torch.float16))
GATHER_TRIALS = [
    GatherTrial(FP32, 5, 9, 2056, 1),
    GatherTrial(BF16, 3, 8, 40, 2),
    GatherTrial(FP16, 3, 17, 40, 3),
    GatherTrial(FP32, 2, 3, 4104, 4, "slow_warps"),
    GatherTrial(ALIKE, 3, 8, 40, 5),
    *(
        ManyTrial(RING, 9, 6, 1800, seed, name)
        for seed, name in ((6, None), (7, "slow_warps"), (8, "late_loads"), (9, "slow_producer"), (10, "slow_math"))
    ),
    ManyTrial(RING_FP16, 7, 40, 520, 11),
]

_ROUTE, _IDS, _PLACES, _ALL = "route_rows.cuh", "routes.cuh", "route/params.cuh", "route/count_all.cuh"
_COUNT, _PARTS = "count_routes.cuh", "route/sum_parts.cuh"
_GATHER, _MANY = "gather_weighted.cuh", "gather_weighted_many.cuh"
_SUM = _TOLD = "gather/params.cuh"
ROUTE_MUTATIONS = [
    Mutation("an id that no expert has is the last one", _IDS, "? id - first : kNoExpert;", "? id - first : count - 1;"),
    Mutation("ids are not counted from the first expert", _IDS, "? id - first : kNoExpert;", "? id : kNoExpert;", shows_in=INT32),
    Mutation("ids before the first expert count", _IDS, "id - first < count", "id < first + count", shows_in=INT32),
    Mutation("the gap between the ids of tokens is skipped for each route", _PLACES, "uint64_t{route / p.topk} * p.gap", "uint64_t{route} * p.gap"),
    Mutation("the gap between the ids of tokens is forgotten", _PLACES, "of_token -= p.topk, at += p.gap;", "of_token -= p.topk;"),
    Mutation("a route of the next token is one of this", _PLACES, "if (of_token >= p.topk) of_token -= p.topk, at += p.gap;", ""),
    Mutation("steps without their rest", _PLACES, "at += step.at, of_token += step.of_token;", "at += step.at;"),
    Mutation("routes are one place apart", _PLACES, "at += step.at, of", "at += kNumThreads, of"),
    Mutation("the upper half of an id is not looked at", _IDS, "words.y == 0 ? words.x : kNoExpert", "words.x", shows_in=INT64),
    Mutation("ids of 8 bytes read as if of 4", _IDS, "ids + at * 8", "ids + at * 4", shows_in=INT64),
    Mutation("routes behind the last are counted", _ALL, "ids[i] = route < p.num_routes ? place.id(p) : kNoId;", "ids[i] = place.id(p);"),
    Mutation("the first routes alone are counted", _ALL, "first < p.num_routes; first += kNumThreads * kAtOnce", "first < 1; first += kNumThreads * kAtOnce * 8"),
    Mutation("routes of this CTA count as before it", _ALL, "ptx::thread_index() < first_of_cta)", "ptx::thread_index() < first_of_cta + kNumThreads)"),
    Mutation("routes before this CTA are forgotten", _ALL, "ptx::red_shared_add(&shared.before[expert], 1);", ";"),
    Mutation("counters begin as they are", _ROUTE, "    ptx::st_shared_b32(&shared.total[thread], 0);\n", ""),
    Mutation("counters of the CTAs before begin as they are", _ROUTE, "    ptx::st_shared_b32(&shared.before[thread], 0);\n", ""),
    Mutation("counters of warps begin as they are", _ROUTE, "ptx::st_shared_b32(&shared.next[w][thread], 0);", ";"),
    Mutation("counting begins before the counters are zero", _ROUTE, "  }\n  ptx::syncthreads();\n\n  ptx::griddepcontrol_wait();", "  }\n\n  ptx::griddepcontrol_wait();"),
    Mutation("ids are read before the kernel ahead has ended", _ROUTE, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("lanes above count as before", _ROUTE, "ptx::popc(same & ((1u << lane) - 1))", "ptx::popc(same >> lane >> 1)"),
    Mutation("all lanes of an expert have one row", _ROUTE, "[warp][expert]) + rank : ~0u;", "[warp][expert]) : ~0u;"),
    Mutation("a warp has one route of each expert", _ROUTE, "ptx::st_shared_b32(&shared.next[warp][expert], ptx::popc(same));", "ptx::st_shared_b32(&shared.next[warp][expert], 1);"),
    Mutation("starts are summed before all have counted", _ROUTE, "  ptx::syncthreads();\n\n  const uint32_t total", "  const uint32_t total"),
    Mutation("sums of warps are added before they are there", _ROUTE, "in_warp);\n  ptx::syncthreads();\n", "in_warp);\n"),
    Mutation("an expert starts where it ends", _ROUTE, "in_warp - total, ptx", "in_warp, ptx"),
    Mutation("experts of the warps before are forgotten", _ROUTE, "(warp > 0 ? before : 0) + in_warp", "in_warp"),
    Mutation("the last warp with routes has none", _ROUTE, "left < kWarps ? left : kWarps;", "left < kWarps ? left - 1 : kWarps;"),
    Mutation("warps of a CTA begin at one row", _ROUTE, "        row += routes[w];\n", ""),
    Mutation("an expert's rows begin at the first of all", _ROUTE, "uint32_t row = start.own + ptx::ld_shared_b32", "uint32_t row = ptx::ld_shared_b32"),
    Mutation("an expert ends where it starts", _ROUTE, "p.ends + thread, start.own + total", "p.ends + thread, start.own"),
    Mutation("rows are given before warps know where", _ROUTE, "  ptx::syncthreads();\n\n  if (route >= p.num_routes) return;", "  if (route >= p.num_routes) return;"),
    Mutation("the token of a row is its route", _ROUTE, "row, route / p.topk", "row, route"),
    Mutation("a route without an expert keeps its row", _ROUTE, "    ptx::st_global_b32(p.row_of + route, ~0u);\n", ""),
    Mutation("rows behind the last keep their token", _ROUTE, "    ptx::st_global_b32(p.token_of + route, ~0u);\n", ""),
    Mutation("rows behind the last keep their expert", _ROUTE, "    ptx::st_global_b32(p.ids + route, ~0u);\n", ""),
    Mutation("the last row has no token", _ROUTE, "route >= start.used", "route + 1 >= start.used"),
    Mutation("counters of a part begin as they are", _COUNT, "ptx::st_shared_b32(&shared.count[expert], 0);", ";", shows_in=BY_PARTS),
    Mutation("a part is counted before its counters are zero", _COUNT, "  Place place(p, first);\n  ptx::syncthreads();\n", "  Place place(p, first);\n", shows_in=BY_PARTS),
    Mutation("ids of a part are read before the kernel ahead has ended", _COUNT, "  ptx::griddepcontrol_wait();\n", "", shows_in=BY_PARTS),
    Mutation("each part is the first one", _COUNT, "first = ptx::block_index() * kPart + thread", "first = thread", shows_in=BY_PARTS),
    Mutation("routes of the last part that are not there count", _COUNT, "first + i * kNumThreads < p.num_routes ? place.id(p) : kNoId", "place.id(p)", shows_in=BY_PARTS),
    Mutation("a thread counts its first route alone", _COUNT, "    place.advance(p, step);\n", "", shows_in=BY_PARTS),
    Mutation("routes to no expert count", _COUNT, "    if (expert != kNoExpert) ptx::red_shared_add(&shared.count[expert], 1);", "    ptx::red_shared_add(&shared.count[expert], 1);", shows_in=BY_PARTS),
    Mutation("a table is written before all have counted", _COUNT, "  ptx::syncthreads();\n\n  uint32_t* counts", "  uint32_t* counts", shows_in=BY_PARTS),
    Mutation("all parts are written to the first", _COUNT, "p.of_parts + uint64_t{ptx::block_index()} * p.num_experts", "p.of_parts", shows_in=BY_PARTS),
    Mutation("as many experts of a part as there are threads", _COUNT, "expert < p.num_experts; expert += kNumThreads)\n    ptx::st_global_b32", "expert < p.num_experts && expert < kNumThreads; expert += kNumThreads)\n    ptx::st_global_b32", shows_in=MOST),
    Mutation("threads that are left over sum too", _PARTS, "  if (group >= groups) return;  // the remaining threads have no group\n", "", shows_in=BY_PARTS),
    Mutation("an expert is a thread of the group before", _PARTS, "ptx::thread_index() - group * p.num_experts", "(ptx::thread_index() + 1) % p.num_experts", shows_in=BY_PARTS),
    Mutation("all groups begin with the first part", _PARTS, "first = group; first < parts", "first = 0; first < parts", shows_in=BY_PARTS),
    Mutation("sixteen parts of a thread at most", _PARTS, "first < parts; first += groups * kAtOnce", "first < 1; first += groups * kAtOnce", shows_in=MOST),
    Mutation("parts that are not there are summed", _PARTS, "first + i * groups < parts ? ptx::ld_global_b32(counts) : 0", "ptx::ld_global_b32(counts)", shows_in=BY_PARTS),
    Mutation("a thread sums one part again and again", _PARTS, "      counts += groups * p.num_experts;\n", "", shows_in=MOST),
    Mutation("a CTA's own part counts as before it", _PARTS, "< ptx::block_index()) before", "<= ptx::block_index()) before", shows_in=BY_PARTS),
    Mutation("parts before are forgotten", _PARTS, "  ptx::red_shared_add(&shared.before[expert], before);\n", "", shows_in=BY_PARTS),
    Mutation("groups of threads overwrite each other's sums", _PARTS, "ptx::red_shared_add(&shared.total[expert], total)", "ptx::st_shared_b32(&shared.total[expert], total)", shows_in=BY_PARTS),
    Mutation("eight warps of a CTA have routes", _ROUTE, "first < warps; first += kWarpsAtOnce", "first < 1; first += kWarpsAtOnce"),
    Mutation("warps have as many routes as the first eight", _ROUTE, "ptx::ld_shared_b32(&shared.next[first + w][thread])", "ptx::ld_shared_b32(&shared.next[w][thread])"),
]  # fmt: skip
GATHER_MUTATIONS = [
    Mutation("the sum is rounded once for a product and an addition", _SUM, "ptx::add_rn(total[pair * 2], ptx::mul_rn(values.x, weight))", "ptx::fma(values.x, weight, total[pair * 2])"),
    Mutation("columns of a pair swapped", _SUM, "ptx::mul_rn(values.x, weight)", "ptx::mul_rn(values.y, weight)"),
    Mutation("weights of the first routes", _GATHER, "weight_of(p, token, first + i)", "weight_of(p, token, i)"),
    Mutation("rows of the first routes", _GATHER, "row_of(p, token, first + i)", "row_of(p, token, i)"),
    Mutation("rows of the token before", _TOLD, "p.row_of + uint64_t{token} * p.topk", "p.row_of + uint64_t{token > 0 ? token - 1 : 0} * p.topk"),
    Mutation("weights of the token before", _TOLD, "uint64_t{token} * p.weights_pitch", "uint64_t{token > 0 ? token - 1 : 0} * p.weights_pitch"),
    Mutation("weights lie without gaps", _TOLD, "uint64_t{token} * p.weights_pitch", "uint64_t{token} * p.topk"),
    Mutation("all weights are 2 where there are none", _TOLD, "return 1.f;", "return 2.f;", shows_in=ALIKE),
    Mutation("routes past the last are read", _GATHER, "first + i < p.topk ? row_of", "true ? row_of"),
    Mutation("weights past the last are read", _GATHER, "first + i < p.topk ? weight_of", "true ? weight_of"),
    Mutation("a route without a row adds the first one", _GATHER, "if (rows[i] >= 0) add_row", "if (first + i < p.topk) add_row"),
    Mutation("eight routes at most", _GATHER, "first < p.topk; first += kAtOnce", "first < 1; first += kAtOnce"),
    Mutation("the order of routes is turned around", _GATHER, "      if (rows[i] >= 0) add_row(total, loaded[i], weights[i]);", "      if (rows[kAtOnce - 1 - i] >= 0) add_row(total, loaded[kAtOnce - 1 - i], weights[kAtOnce - 1 - i]);"),
    Mutation("columns past the last are written", _GATHER, "  if (piece >= pieces) return;\n", ""),
    Mutation("a token's columns end with the first CTA", _GATHER, "ptx::block_index() % per_token * kNumThreads + ", ""),
    Mutation("the CTAs of a token count as tokens", _GATHER, "token = ptx::block_index() / per_token", "token = ptx::block_index()"),
    Mutation("operands are read before the kernel ahead has ended", _GATHER, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("BF16 weights taken for FP16", _TOLD, "kWeightIsFp16 ? ptx::unpack_f16", "true ? ptx::unpack_f16", shows_in=BF16),
    Mutation("FP16 weights taken for BF16", _TOLD, "kWeightIsFp16 ? ptx::unpack_f16", "false ? ptx::unpack_f16", shows_in=FP16),
    Mutation("pairs of a store swapped", _SUM, "ptx::pack_bf16(total[0], total[1]), ptx::pack_bf16(total[2], total[3])", "ptx::pack_bf16(total[2], total[3]), ptx::pack_bf16(total[0], total[1])"),
    *(
        Mutation(name, _MANY, old, new, shows_in=RING)
        for name, old, new in (
            ("a unit begins where its token does", "(unit - token * pieces) * kPiece", "0"),
            ("units are tokens", "token = unit / pieces, j", "token = unit, j"),
            ("routes past a batch are those of its begin", "j = first + ptx::lane_index()", "j = ptx::lane_index()"),
            ("routes past the last of a batch are read", "token < p.tokens && j < p.topk", "token < p.tokens"),
            ("routes of tokens that are not there are read", "token < p.tokens && j < p.topk", "j < p.topk"),
            ("a token has 32 routes at most", "has_more = now.first + 32 < p.topk", "has_more = false"),
            ("each batch is the first one", "has_more ? now.first + 32 : 0", "0"),
            ("CTAs take one unit", "now.unit + ptx::grid_size()", "~0u"),
            ("CTAs leave units out", "now.unit + ptx::grid_size()", "now.unit + ptx::grid_size() + 1"),
            ("each piece is whole", "(columns < kPiece ? columns : kPiece) * 2", "kPiece * 2"),
            ("routes without a row are loaded", "left = ptx::ballot_sync(now.row >= 0); left != 0; left &= left - 1) {\n      const uint32_t row", "left = ptx::ballot_sync(now.row >= -1); left != 0; left &= left - 1) {\n      const uint32_t row"),
            ("routes without a row are waited for", "left = ptx::ballot_sync(now.row >= 0); left != 0; left &= left - 1) {\n      const float weight", "left = ptx::ballot_sync(now.row >= -1); left != 0; left &= left - 1) {\n      const float weight"),
            ("slots are loaded while they are read", "        wait_until_free(shared.ring, at);\n", ""),
            ("slots are read before they are loaded", "      wait_until_loaded(shared.ring, at);\n", ""),
            ("slots are never given back", "      release(shared.ring, at, lane, ptx::shfl_sync(ptx::float_of(row[kPanels - 1].w), 0));\n", ""),
            ("a slot is given back when one lane has read it", "ptx::shfl_sync(ptx::float_of(row[kPanels - 1].w), 0)", "ptx::float_of(row[kPanels - 1].w)"),
            ("a slot is given back before it is read", "      wait_until_loaded(shared.ring, at);\n", "      release(shared.ring, at, lane);\n      wait_until_loaded(shared.ring, at);\n"),
            ("a piece too few bytes is expected", "expect_tx(&shared.ring.full[at.stage], bytes)", "expect_tx(&shared.ring.full[at.stage], bytes - 16)"),
            ("all rows come to the first slot", "shared.rows[at.stage], row_at", "shared.rows[0], row_at"),
            ("all rows are read from the first slot", "shared.rows[at.stage] + thread", "shared.rows[0] + thread"),
            ("rows begin with their first column", "row_at(p, row, now.column)", "row_at(p, row, 0)"),
            ("rows come in another order than their weights", "(now.row), lowest(left))", "(now.row), lowest((left & (left - 1)) != 0 ? left & (left - 1) : left))"),
            ("all panels are the first", "slot + i * (kPanel * 2)", "slot"),
            ("all panels have the sums of the first", "store_sums(sums_at(p, now.token, column), total[i])", "store_sums(sums_at(p, now.token, column), total[0])"),
            ("all panels are stored to the first", "now.column + i * kPanel + thread", "now.column + thread"),
            ("columns past a row are stored", "if (column < p.n) store_sums", "store_sums"),
            ("sums go on with the next token", "        for (uint32_t c = 0; c < kColumns; ++c) total[i][c] = 0.f;", "        for (uint32_t c = 0; c < 1; ++c) total[i][c] = 0.f;"),
            ("sums are stored for each batch", "if (next.unit != now.unit) {", "if (true) {"),
            ("the ring is used before it is there", "shared.ring.init();\n  ptx::syncthreads();\n", "shared.ring.init();\n"),
            ("the ring begins before the kernel ahead has ended", "  ptx::griddepcontrol_wait();\n", ""),
        )
    ),
]  # fmt: skip
