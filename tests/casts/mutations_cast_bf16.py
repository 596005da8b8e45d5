"""Ways to break how cast_rows gathers and activates rows in BF16, and the trials that must notice."""

from __future__ import annotations

from dataclasses import replace

import torch

from deep_gemm.casts.cast_rows import Groups, cast_config
from deep_gemm.casts.gating import Gating
from deep_gemm.casts.rules import UNSCALED
from lab.sim.cast_rows import RowTrial
from lab.sim.mutate import Mutation

BF16, FP16, FP32 = (
    cast_config(dtype, is_aligned=True, is_few=True, to_routes=True, to=UNSCALED)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
)
SINGLE = cast_config(torch.bfloat16, is_aligned=False, is_few=True, to_routes=True, to=UNSCALED)
SILU = cast_config(torch.bfloat16, is_aligned=True, is_few=False, activates=True, groups=Groups.UNTIL, to=UNSCALED)

TRIALS = [
    RowTrial(BF16, 9, 520, 1, data="ordinary", topk=8),
    RowTrial(replace(BF16, rows=4), 23, 264, 2, "slow_lanes", topk=3),
    RowTrial(FP16, 9, 136, 3, topk=20),
    RowTrial(FP32, 9, 260, 4, data="ordinary", topk=5),
    RowTrial(SINGLE, 9, 261, 5, data="ordinary", topk=3, padding=3),
    RowTrial(SILU, 60, 264, 6, data="ordinary", sizes=(5, 5, 51)),
    RowTrial(SILU, 60, 136, 7, "slow_warps", data="ordinary", sizes=(60,), gating=Gating(limit=1.5)),
]

_BF16, _BLOCK = "cast/bf16.cuh", "cast/team_of_block.cuh"

MUTATIONS = [
    Mutation("elements of a word swapped", _BF16, "ptx::pack_bf16(v[i], v[i + 1])", "ptx::pack_bf16(v[i + 1], v[i])"),
    Mutation("both elements of a word are the first", _BF16, "ptx::pack_bf16(v[i], v[i + 1])", "ptx::pack_bf16(v[i], v[i])"),
    Mutation("words one too far", _BF16, "values.words[i / 2] = ptx", "values.words[(i / 2 + 1) % (kElements / 2)] = ptx"),
    Mutation("single numbers are bytes", _BF16, "ptx::st_global_b16(row", "ptx::st_global_b8(row", shows_in=SINGLE),
    Mutation("single numbers lie a byte apart", _BF16, "ptx::st_global_b16(row + uint64_t{column} * 2", "ptx::st_global_b16(row + uint64_t{column} / 2 * 2", shows_in=SINGLE),
    Mutation("the second of a word is the first", _BF16, "words[i / 2] >> i % 2 * 16", "words[i / 2]", shows_in=SINGLE),
    Mutation("the second word is the first", _BF16, "words[i / 2] >> i % 2 * 16", "words[0] >> i % 2 * 16", shows_in=SINGLE),
    Mutation("all blocks are stored in the first's place", "cast/values.cuh", "if (column < end) values.store(row, column);", "if (column < end) values.store(row, column - first_column);"),
    Mutation("numbers lie a byte apart", _BF16, "uint8_t* to = row + uint64_t{column} * 2;", "uint8_t* to = row + uint64_t{column};"),
    Mutation("halves of 16 bytes swapped", _BF16, "words[0], words[1], words[2], words[3]", "words[2], words[3], words[0], words[1]"),
    Mutation("words of 8 bytes swapped", _BF16, "ptx::st_global_v2_b32(to, words[0], words[1])", "ptx::st_global_v2_b32(to, words[1], words[0])", shows_in=FP32),
    Mutation("all rows are the first", _BLOCK, "elements[e] = element_of(held[i], e);\n    targets", "elements[e] = element_of(held[0], e);\n    targets"),
    Mutation("all rows go where the first one goes", _BLOCK, "targets.store(p, unit, i, block, lane, pack_values(elements))", "targets.store(p, unit, 0, block, lane, pack_values(elements))"),
    Mutation("all blocks go to the first", _BLOCK, "targets.store(p, unit, i, block, lane, pack_values(elements))", "targets.store(p, unit, i, 0, lane, pack_values(elements))"),
]  # fmt: skip
