"""Ways to break the kernel of experts for few tokens, and the trials they meet."""

from __future__ import annotations

import torch

from deep_gemm.moe.experts_few import FewConfig
from lab.sim.experts_few import GATINGS, FewTrial
from lab.sim.mutate import Mutation

FIRST, SECOND, FIRST_16, SECOND_16 = (FewConfig(columns, second) for columns in (8, 16) for second in (False, True))
FIRST_64, SECOND_64 = FewConfig(64, False), FewConfig(64, True)
_LIMIT, _SHARP, _SITU = GATINGS[1:]
TRIALS = [
    FewTrial(FIRST, 7, 3, 40, 72, 144, 1, num_sms=3),
    FewTrial(FIRST, 1, 8, 12, 40, 1040, 2, "slow_math", _LIMIT, torch.int32, num_sms=2),
    FewTrial(FIRST, 8, 4, 512, 24, 72, 3, "slow_producer", _SHARP, num_sms=5),
    FewTrial(FIRST, 5, 2, 3, 200, 136, 4, "slow_warps", _SITU, num_sms=1),
    FewTrial(FIRST_16, 13, 2, 300, 16, 64, 5, "late_loads", num_sms=4),
    FewTrial(FIRST_64, 61, 6, 7, 88, 200, 6, num_sms=2),
    FewTrial(SECOND, 7, 3, 40, 80, 144, 7, num_sms=3),
    FewTrial(SECOND, 1, 8, 12, 48, 1040, 8, "slow_math", ids=torch.int32, num_sms=2),
    FewTrial(SECOND, 5, 2, 3, 208, 136, 9, "slow_warps", num_sms=1),
    FewTrial(SECOND_16, 13, 2, 300, 16, 64, 10, "late_loads", num_sms=4),
    FewTrial(SECOND_64, 61, 2, 7, 96, 200, 11, num_sms=2),
    FewTrial(SECOND_64, 40, 1, 1, 16, 72, 12, "slow_cta", num_sms=3),
]

_FEW, _GATES = "experts_few.cuh", "cast/silu.cuh"
MUTATIONS = [
    Mutation("the upper half of an id is not looked at", _FEW, "high == 0 && low < p.num", "low < p.num"),
    Mutation("ids of 4 bytes have an upper half", _FEW, "p.id_bytes == 8 ? ptx::ld", "p.id_bytes != 0 ? ptx::ld", shows_in=FIRST),
    Mutation("an id that no expert has is one", _FEW, "low < p.num_experts ? low", "low <= p.num_experts ? low"),
    Mutation("ids of tokens follow each other", _FEW, "uint64_t{token} * p.ids_pitch", "uint64_t{token} * p.topk"),
    Mutation("ids are read before the kernel ahead has ended", _FEW, "if constexpr (!kIsSecond) ptx::griddepcontrol_wait();", ""),
    Mutation("the first 32 tokens alone have experts", _FEW, "tokens_of[expert][token / 32]", "tokens_of[expert][0]", shows_in=FIRST_64),
    Mutation("routes behind the first of each thread are forgotten", _FEW, "; route < p.tokens * p.topk; route += kNumThreads) {\n    const uint32_t token = route / p.topk, expert = expert_of(p, token, route);\n    if", "; route < kNumThreads && route < p.tokens * p.topk; route += kNumThreads) {\n    const uint32_t token = route / p.topk, expert = expert_of(p, token, route);\n    if", shows_in=FIRST_64),
    Mutation("tables begin as they are", _FEW, "    ptx::st_shared_v2_b32(&shared.tokens_of[i], 0, 0);\n", "    ;\n"),
    Mutation("routes are entered before tables are empty", _FEW, "tokens_of[i], 0, 0);\n  ptx::syncthreads();\n", "tokens_of[i], 0, 0);\n"),
    Mutation("routes are counted before all are entered", _FEW, "token % 32);\n  }\n  ptx::syncthreads();\n", "token % 32);\n  }\n"),
    Mutation("sums of warps are added before they are there", _FEW, "up_to);\n  }\n  ptx::syncthreads();\n", "up_to);\n  }\n"),
    Mutation("experts are looked at before they are listed", _FEW, "before >> 16);\n  }\n  ptx::syncthreads();\n", "before >> 16);\n  }\n"),
    Mutation("experts of the warps before are forgotten", _FEW, "before += w < warp ? of_warp : 0;", ";"),
    Mutation("experts of lower lanes are forgotten", _FEW, "up_to = sum_up_to_lane(counts[0] + counts[1], lane);", "up_to = counts[0] + counts[1];"),
    Mutation("the second expert of a thread has the place of the first", _FEW, "      before += counts[i];\n", "      if (i) before += counts[i];\n"),
    Mutation("rows begin with the number of experts", _FEW, "first_row[thread * 2 + i], before & 0xffff", "first_row[thread * 2 + i], before >> 16"),
    Mutation("a row has all tokens up to its own before it", _FEW, "below = (1u << token % 32) - 1;", "below = (2u << token % 32) - 1;"),
    Mutation("rows of the upper tokens begin anew", _FEW, "ptx::popc(tokens[0]) + ptx::popc(tokens[1] & below)", "ptx::popc(tokens[1] & below)", shows_in=FIRST_64),
    Mutation("a route without an expert has row 0", _FEW, "expert == kNone ? kNone :", "expert == kNone ? 0 :"),
    Mutation("no CTA stores rows", _FEW, "ptx::block_index() == ptx::grid_size() - 1", "ptx::block_index() == ptx::grid_size()"),
    Mutation("an expert's weights follow those of the one before that is hit", _FEW, "eight = expert(shared) * p.eights + in_expert", "eight = hit * p.eights + in_expert"),
    Mutation("units of the next expert follow in memory", _FEW, "++hit, in_expert = 0, eight = expert(shared) * p.eights;", "++hit, in_expert = 0;", shows_in=FIRST),
    Mutation("the last units are left out", _FEW, "end = part.first + part.count;", "end = part.first + part.count - (part.count > 1);"),
    Mutation("an item of the second product has two experts", _FEW, "if (kIsSecond && of_expert < count) count = of_expert;", "", shows_in=SECOND),
    Mutation("a stage has no room for B", _FEW, "stage_bytes = a_bytes + kBBytes;", "stage_bytes = a_bytes;"),
    Mutation("the ring has a stage more", _FEW, "stages = kRingBytes / stage_bytes;", "stages = kRingBytes / stage_bytes + 1;"),
    Mutation("the ring never turns", _FEW, "stage = 0, parity ^= 1;", "stage = 0;"),
    Mutation("B is that of the first k-block", _FEW, "                     b.k_block * kBlockK, row);", "                     0, row);"),
    Mutation("weights are those of the first k-block", _FEW, "to + i * kUnitBytes, weights.k_block * kBlockK, 0, 0, eight", "to + i * kUnitBytes, 0, 0, 0, eight"),
    Mutation("all units land in one place", _FEW, "to + i * kUnitBytes, weights", "to, weights"),
    Mutation("rows of the second product begin with the first", _FEW, "row = kIsSecond ? ptx::ld_shared_b32(&shared.first_row[b.item.unit.expert(shared)]) : 0;", "row = 0;", shows_in=SECOND),
    Mutation("B is asked for before the kernel ahead has ended", _FEW, "      ptx::griddepcontrol_wait();\n      may", "      may", shows_in=SECOND),
    Mutation("weights overwrite a slot that is in use", _FEW, "      ptx::mbarrier_wait_parity(&shared.empty[weights.at.stage], weights.at.parity ^ 1);\n", ""),
    Mutation("a slot is multiplied before it has landed", _FEW, "    ptx::mbarrier_wait_parity(&shared.full[at.stage], at.parity);\n", ""),
    Mutation("a slot goes back before it is multiplied", _FEW, "shared.empty[last]);\n    last = at.stage;", "shared.empty[at.stage]);\n    last = at.stage;"),
    Mutation("the last slot of an item is kept", _FEW, "  if (lane == 0) ptx::mbarrier_arrive(&shared.empty[last]);\n}", "}"),
    Mutation("sums begin with those of the last item", _FEW, "work.a_bytes / 16, k_block != 0);", "work.a_bytes / 16, true);"),
    Mutation("the second warpgroup multiplies the first rows", _FEW, "? product * (kProductBytes / 16) : 0;", "? 0 : 0;"),
    Mutation("B is looked for where weights end", _FEW, "slot + work.a_bytes / 16, k", "slot + item.count * (kUnitBytes / 16), k"),
    Mutation("gate and up are not rounded", _FEW, "ptx::unpack_bf16(ptx::pack_bf16(gate, up));", "ptx::Float2{gate, up};"),
    Mutation("gate and up change places", _FEW, "activated(p, first, second)", "activated(p, second, first)"),
    Mutation("a limit is not looked at", _FEW, "p.gating == 1 ? Swiglu(p)", "p.gating == 1 ? Plain(p)"),
    Mutation("SiTU is SwiGLU", _FEW, ": Situ(p)(", ": Swiglu(p)("),
    Mutation("units behind an item's last are stored", _FEW, "    if (in_item >= item.count) break;\n", ""),
    Mutation("rows of other experts are stored", _FEW, "        if (b >= count) continue;\n", "", shows_in=SECOND),
    Mutation("tokens of other experts are stored", _FEW, "} else if (rows.has(b)) {", "} else {", shows_in=FIRST),
    Mutation("the lower rows of a unit are stored twice", _FEW, "column + kUnitRows / 2, second);", "column, second);", shows_in=SECOND),
    Mutation("warps of both warpgroups store the same units", _FEW, "(warp / 4 + i * 2) * kUnitsOfProduct", "i * 2 * kUnitsOfProduct"),
]  # fmt: skip
