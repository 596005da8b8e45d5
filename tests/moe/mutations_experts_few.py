"""Ways to break the kernel of experts for few tokens, and the trials that must notice."""

from __future__ import annotations

import torch

from deep_gemm.core.check.recipes import PER_BLOCK, WHOLE
from deep_gemm.moe.experts_few import FewConfig
from lab.sim.experts_few import GATINGS, FewTrial
from lab.sim.mutate import Mutation

FIRST, BLOCKS, ROWS, SECOND, BLOCKS_2, ROWS_2 = (
    FewConfig(second, scales) for second in (False, True) for scales in (None, PER_BLOCK, WHOLE)
)
_LIMIT, _SHARP, _SITU = GATINGS[1:]
TRIALS = [
    FewTrial(FIRST, 7, 3, 40, 72, 144, 1, num_sms=3),
    FewTrial(FIRST, 1, 8, 12, 40, 1040, 2, "slow_math", _LIMIT, torch.int32, num_sms=2),
    FewTrial(FIRST, 8, 4, 512, 24, 72, 3, "slow_producer", _SHARP, num_sms=5),
    FewTrial(FIRST, 5, 2, 3, 200, 136, 4, "slow_warps", _SITU, num_sms=1),
    FewTrial(FIRST, 7, 2, 300, 16, 64, 5, "late_loads", num_sms=4),
    FewTrial(FIRST, 8, 55, 70, 88, 200, 6, num_sms=2),
    FewTrial(FIRST, 4, 3, 7, 16, 72, 21, first_expert=14, num_sms=2),
    FewTrial(FIRST, 3, 4, 2, 64, 144, 13, num_sms=5),  # two CTAs for each expert, and one left over
    FewTrial(SECOND, 7, 3, 40, 80, 144, 7, num_sms=3),
    FewTrial(SECOND, 1, 8, 12, 48, 1040, 8, "slow_math", ids=torch.int32, num_sms=2),
    FewTrial(SECOND, 5, 2, 3, 208, 136, 9, "slow_warps", num_sms=1),
    FewTrial(SECOND, 7, 2, 300, 16, 64, 10, "late_loads", num_sms=4),
    FewTrial(SECOND, 8, 3, 7, 96, 200, 11, num_sms=2),
    FewTrial(SECOND, 8, 2, 1, 16, 72, 12, "slow_cta", num_sms=3),
    FewTrial(BLOCKS, 7, 3, 5, 136, 656, 14, "slow_math", num_sms=3),
    FewTrial(BLOCKS, 8, 4, 2, 32, 144, 15, "slow_warps", num_sms=5),
    FewTrial(BLOCKS_2, 8, 3, 4, 144, 656, 16, "late_loads", num_sms=2),
    FewTrial(BLOCKS_2, 8, 2, 1, 64, 1936, 17, num_sms=4),
    FewTrial(BLOCKS_2, 1, 1, 1, 16, 144, num_sms=2),  # no expert is hit
    FewTrial(ROWS, 5, 2, 4, 40, 656, 18, "slow_producer", num_sms=2),
    FewTrial(ROWS, 8, 2, 3, 72, 272, 19, "slow_warps", num_sms=3),
    FewTrial(ROWS_2, 7, 3, 12, 48, 144, 20, "slow_warps", num_sms=3),
]

_FEW = "experts_few.cuh"
MUTATIONS = [
    Mutation("the upper half of an id is not looked at", _FEW, "high == 0 && low < p.num", "low < p.num"),
    Mutation("ids of 4 bytes have an upper half", _FEW, "p.id_bytes == 8 ? ptx::ld", "p.id_bytes != 0 ? ptx::ld", shows_in=FIRST),
    Mutation("an id that no expert has is one", _FEW, "low < p.num_experts ? low", "low <= p.num_experts ? low % p.num_experts"),
    Mutation("experts are numbered from 0", _FEW, "ptx::ld_relaxed_gpu_b32(id) - p.first_expert;", "ptx::ld_relaxed_gpu_b32(id);", shows_in=FIRST),
    Mutation("ids of tokens follow each other", _FEW, "uint64_t{token} * p.ids_pitch", "uint64_t{token} * p.topk"),
    Mutation("ids are read before the kernel ahead has ended", _FEW, "  else\n    ptx::griddepcontrol_wait();\n", "", shows_in=FIRST),
    Mutation("routes behind the first of each thread are forgotten", _FEW, "; route < p.tokens * p.topk; route += kNumThreads) {\n    const uint32_t token = route / p.topk, expert = expert_of(p, token, route);\n    if", "; route < kNumThreads && route < p.tokens * p.topk; route += kNumThreads) {\n    const uint32_t token = route / p.topk, expert = expert_of(p, token, route);\n    if", shows_in=FIRST),
    Mutation("tables begin as they are", _FEW, "i += kNumThreads) ptx::st_shared_b32(&shared.entry_of[i], 0);\n", "i += kNumThreads);\n"),
    Mutation("routes are entered before tables are empty", _FEW, "entry_of[i], 0);\n  ptx::syncthreads();\n", "entry_of[i], 0);\n"),
    Mutation("routes are counted before all are entered", _FEW, "1u << token);\n  }\n  ptx::syncthreads();\n", "1u << token);\n  }\n"),
    Mutation("sums of warps are added before they are there", _FEW, "up_to);\n  ptx::syncthreads();\n", "up_to);\n"),
    Mutation("experts are looked at before they are listed", _FEW, "before << 16);\n  }\n  ptx::syncthreads();\n", "before << 16);\n  }\n"),
    Mutation("experts of the warps before are forgotten", _FEW, "before += w < warp ? of_warp : 0,", ""),
    Mutation("experts of lower lanes are forgotten", _FEW, "up_to = sum_up_to_lane(counts[0] + counts[1], lane);", "up_to = counts[0] + counts[1];"),
    Mutation("the second expert of a thread has the place of the first", _FEW, "i < 2; before += counts[i++])", "i < 2; ++i)"),
    Mutation("rows begin with the number of experts", _FEW, "tokens[i] | before << 16", "tokens[i] | before >> 16 << 16"),
    Mutation("a row has all tokens up to its own before it", _FEW, "ptx::popc(entry & ((1u << token) - 1))", "ptx::popc(entry & ((2u << token) - 1))"),
    Mutation("a route without an expert has row 0", _FEW, ", token) : ~0u;", ", token) : 0;"),
    Mutation("no CTA stores rows", _FEW, "ptx::block_index() == ptx::grid_size() - 1", "false"),
    Mutation("an expert's weights follow those of the one before that is hit", _FEW, "in_map = expert * p.units_apart", "in_map = place * p.units_apart"),
    Mutation("the last units are left out", _FEW, "end = part.first + part.count;", "end = part.first + part.count - (part.count > 1);"),
    Mutation("an expert's last item is left out if it is smaller", _FEW, "items_of_expert = ceil_div(p.units, item_units);", "items_of_expert = p.units / item_units;"),
    Mutation("an item of an expert begins where that of the first expert does", _FEW, "(number - place * work.items_of_expert) * work.item_units", "number * work.item_units"),
    Mutation("an item has two experts", _FEW, "count = p.units - unit < work.item_units ? p.units - unit : work.item_units;", "count = work.item_units;"),
    Mutation("a stage has no room for B", _FEW, "stage_bytes = a_bytes + kBBytes;", "stage_bytes = a_bytes;"),
    Mutation("the ring has a stage more", _FEW, ": kMaxStages;\n  }", ": kMaxStages;\n    ++stages;\n  }"),
    Mutation("the ring never turns", _FEW, "stage = 0, parity ^= 1;", "stage = 0;"),
    Mutation("B is that of the first k-block", _FEW, "to, k_block * kBlockK, kIsSecond", "to, 0, kIsSecond"),
    Mutation("weights are those of the first k-block", _FEW, "k_block * kBlockK, 0, 0, item.in_map + unit);", "0, 0, 0, item.in_map + unit);"),
    Mutation("all units land in one place", _FEW, "+ unit * kUnitBytes", "+ 0"),
    Mutation("units behind four follow the boxes", _FEW, "lane * 4 : lane + fours * 3;", "lane * 4 : lane;"),
    Mutation("four units come in a small box", _FEW, "lane < fours ? &p.map_fours : &p.map_w", "&p.map_w"),
    Mutation("slots are filled before they are free", _FEW, "item.count * kUnitBytes);\n    }\n    ptx::syncwarp();\n", "item.count * kUnitBytes);\n    }\n"),
    Mutation("rows of the second product begin with the first", _FEW, "kIsSecond ? item.entry >> 16 : 0);", "0);", shows_in=SECOND),
    Mutation("B is asked for before the kernel ahead has ended", _FEW, "  if constexpr (kIsSecond) ptx::griddepcontrol_wait();\n  const", "  const", shows_in=SECOND),
    Mutation("weights overwrite a slot that is in use", _FEW, "    if (lane == 0) {\n      ptx::mbarrier_wait_parity(&shared.empty[stage], parity ^ 1);\n", "    if (lane == 0) {\n"),
    Mutation("B overwrites a slot that is in use", _FEW, "work.a_bytes;\n    ptx::mbarrier_wait_parity(&shared.empty[stage], parity ^ 1);\n", "work.a_bytes;\n"),
    Mutation("a slot is full with weights or B", _FEW, "mbarrier_init(&shared.full[stage], 2);", "mbarrier_init(&shared.full[stage], 1);"),
    Mutation("a slot is multiplied before it has landed", _FEW, "    ptx::mbarrier_wait_parity(&shared.full[stage], parity);\n", ""),
    Mutation("sums begin with those of the last item", _FEW, "(products, a, b, k_block != 0);", "(products, a, b, true);", shows_in=FIRST),
    Mutation("the second warpgroup multiplies the first rows", _FEW, "? warp / 4 * (kWarpgroupBytes / 16) : 0);", "? 0 : 0);"),
    Mutation("B is looked for where weights end", _FEW, "b = slot + work.a_bytes / 16;", "b = slot + item.count * (kUnitBytes / 16);"),
    Mutation("gate and up are not rounded", _FEW, "ptx::unpack_bf16(ptx::pack_bf16(gate, up));", "ptx::Float2{gate, up};"),
    Mutation("gate and up change places", _FEW, "activated(p, first, second), 0", "activated(p, second, first), 0", shows_in=FIRST),
    Mutation("a limit is not looked at", _FEW, ": Swiglu(p)(", ": Plain(p)("),
    Mutation("SiTU is SwiGLU", _FEW, "p.gating == 2 ? Situ(p)", "p.gating == 2 ? Swiglu(p)"),
    Mutation("units behind an item's last are stored", _FEW, "  if (warp >= item.count) return;\n", ""),
    Mutation("rows of other experts are stored", _FEW, "(1u << ptx::popc(entry & 0xffff)) - 1", "0xffff", shows_in=SECOND),
    Mutation("tokens of other experts are stored", _FEW, ": entry & 0xffff; }", ": 0xffff; }", shows_in=FIRST),
    Mutation("the lower rows of a unit are stored twice", _FEW, "ptx::st_global_b16(to + kUnitRows,", "ptx::st_global_b16(to,", shows_in=SECOND),
    Mutation("warps store the first unit", _FEW, "column = (item.unit + warp) * (", "column = item.unit * ("),
    Mutation("E4M3: weights' scales are those of the first k-block", _FEW, "uint64_t{k_block} * p.sfw_stride_k", "0", shows_in=BLOCKS),
    Mutation("E4M3: weights' scales are those of the first expert", _FEW, "uint64_t{expert} * p.sfw_stride_e", "0", shows_in=BLOCKS),
    Mutation("E4M3: up has the scales of gate", _FEW, "(row < 8 ? 0 : p.n)", "0", shows_in=BLOCKS),
    Mutation("E4M3: all rows of a thread have gate's scale", _FEW, "of_rows[i / 2]);", "of_rows[0]);", shows_in=BLOCKS),
    Mutation("E4M3: all units have the first one's scales", _FEW, "item.scale_of(p, unit, half", "item.scale_of(p, 0, half", shows_in=BLOCKS_2),
    Mutation("E4M3: rows have the scales of their unit's first", _FEW, "item.scale_of(p, warp, lane / 4 + i * 8, 0)", "item.scale_of(p, warp, i * 8, 0)", shows_in=ROWS),
    Mutation("E4M3: values are not swizzled", _FEW, "(lane / 4 ^ column % 8) * 16", "lane / 4 * 16", shows_in=BLOCKS),
    Mutation("E4M3: every other column is cast", _FEW, "  columns &= columns - 1;\n", "  columns &= columns - 1, columns &= columns - 1;\n", shows_in=BLOCKS),
    Mutation("E4M3: activations are read before the kernel ahead has ended", _FEW, "    if constexpr (kIsSecond) ptx::griddepcontrol_wait();\n    if", "    if", shows_in=BLOCKS_2),
    Mutation("E4M3: a CTA without items ends before the kernel ahead", _FEW, "  if constexpr (kIsSecond) ptx::griddepcontrol_wait();  // without items", "  // without items", shows_in=BLOCKS_2),
    Mutation("E4M3: columns behind the last are cast", _FEW, " || first >= p.k)", ")", shows_in=ROWS),
    Mutation("E4M3: rows of the second product begin with the first", _FEW, "(kIsSecond ? item.entry >> 16 : 0) + column", "column", shows_in=BLOCKS_2),
    Mutation("E4M3: B is cast into a slot that is in use", _FEW, "      ptx::mbarrier_wait_parity(&shared.empty[stage], parity ^ 1);\n#pragma", "#pragma", shows_in=BLOCKS),
    Mutation("E4M3: WGMMA may not see what threads have stored", _FEW, "    ptx::fence_proxy_async_shared();  // WGMMA is going to read what threads have stored\n", "", shows_in=BLOCKS),
    Mutation("E4M3: a slot is full when its first lane has stored", _FEW, "have stored\n    ptx::syncwarp();\n", "have stored\n", shows_in=BLOCKS),
    Mutation("E4M3: a row's scale is that of a part of k", _FEW, "amax = ptx::max_f32(amax, ptx::ld_shared_f32(of_warp", "amax = ptx::max_f32(0.f, ptx::ld_shared_f32(of_warp", shows_in=ROWS),
    Mutation("E4M3: largest magnitudes are compared before they are there", _FEW, "    ptx::bar_sync(1, kNumBWarps * 32);\n    float amax", "    float amax", shows_in=ROWS),
    Mutation("E4M3: largest magnitudes of the next item come too early", _FEW, "    ptx::bar_sync(1, kNumBWarps * 32);  // before another item's\n", "", shows_in=ROWS_2),
    Mutation("a slot goes back before it is multiplied", _FEW, "    ptx::wgmma_wait_group<0>();\n", ""),
    Mutation("E4M3: sums begin with those of the last item", _FEW, "      if (k_block == 0) sums[i] = 0;\n", "", shows_in=BLOCKS),
    Mutation("E4M3: totals of rows are not scaled", _FEW, "kIsByRow && k_block + 1 == work.k_blocks", "false", shows_in=ROWS),
    Mutation("E4M3: activations are rounded to BF16", _FEW, "st_global_f32(to, activated(p, first, second))", "st_global_f32(to, ptx::unpack_bf16(ptx::pack_bf16(activated(p, first, second), 0.f)).x)", shows_in=BLOCKS),
    Mutation("E4M3: the ring has more stages than scales have room", _FEW, "kRingBytes / stage_bytes < kMaxStages ? kRingBytes / stage_bytes : kMaxStages", "kRingBytes / stage_bytes", shows_in=BLOCKS_2),
]  # fmt: skip
