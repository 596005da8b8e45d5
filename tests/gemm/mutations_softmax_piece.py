"""Mistakes in the kernel that reads one piece of logits, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.gemm.softmax_piece import BACKWARD, FORWARD
from lab.sim.mutate import Mutation
from lab.sim.softmax_piece import SoftmaxTrial as Trial

TRIALS = [
    Trial(FORWARD, 5, 300, 1),
    Trial(FORWARD, 3, 4500, 2, "slow_warps"),
    Trial(FORWARD, 3, 2052, 3),
    Trial(BACKWARD, 5, 300, 4),
    *(Trial(BACKWARD, 3, 4500, 5, order) for order in ("slow_warps", "slow_lanes")),
]

_KERNEL = "softmax_piece.cuh"
MUTATIONS = [
    Mutation("logits are read before the product has ended", _KERNEL, "  ptx::griddepcontrol_wait();\n", ""),
    Mutation("columns past the last are read", _KERNEL, "if (first + column_of(i) < p.columns) four", "four"),
    Mutation("columns past the last are zeros", _KERNEL, "{nothing, nothing, nothing, nothing}", "{}", shows_in=FORWARD),
    Mutation("a number is not scaled", _KERNEL, "ptx::mul_rn(four.z, p.scale)", "four.z"),
    Mutation("the largest of a lane alone", _KERNEL, "most = ptx::max_f32(most, ptx::shfl_xor_sync(most, bits))", "most += 0", shows_in=FORWARD),
    Mutation("the first number is the largest", _KERNEL, "most = ptx::max_f32(most, x[i])", "most += 0", shows_in=FORWARD),
    Mutation("infinity is subtracted from itself", _KERNEL, "most = kLeast;", "most = x[0];", shows_in=FORWARD),
    Mutation("the last number is left out", _KERNEL, "i = 0; i < kHeld; ++i) sum", "i = 1; i < kHeld; ++i) sum", shows_in=FORWARD),
    Mutation("the sum of a lane alone", _KERNEL, "sum = ptx::add_rn(sum, ptx::shfl_xor_sync(sum, bits))", "sum += 0", shows_in=FORWARD),
    Mutation("a logarithm to the base of 2", _KERNEL, "ptx::lg2_approx(sum), kLogOf2", "ptx::lg2_approx(sum), 1.f", shows_in=FORWARD),
    Mutation("powers of 2", _KERNEL, "ptx::mul_rn(x, kLog2OfE)", "x"),
    Mutation("all chunks are the first", _KERNEL, "end = kIsBackward ? chunks : ptx::block_index() % chunks + 1", "end = 1"),
    Mutation("rows are chunks", _KERNEL, "ptx::block_index() / (kIsBackward ? 1 : chunks)", "ptx::block_index()", shows_in=FORWARD),
    Mutation("sums behind the last block are written", _KERNEL, "lane == 0 && first < p.columns", "lane == 0", shows_in=FORWARD),
    Mutation("sums have no pitch", _KERNEL, "static_cast<uint64_t>(row) * p.sums_pitch", "static_cast<uint64_t>(row) * ceil_div(p.columns, kBlock)", shows_in=FORWARD),
    Mutation("no CTA writes the chosen logit", _KERNEL, "thread == 0 && chunk == 0", "thread == 0 && chunk == 3", shows_in=FORWARD),
    Mutation("a token behind the piece is chosen", _KERNEL, " && token < p.columns)\n", ")\n", shows_in=FORWARD),
    Mutation("tokens count from the vocabulary's first", _KERNEL, "ptx::ld_global_b32(p.tokens + row) - p.first", "ptx::ld_global_b32(p.tokens + row)"),
    Mutation("the first row's token", _KERNEL, "p.tokens + row", "p.tokens"),
    Mutation("the chosen logit is not scaled", _KERNEL, "ptx::mul_rn(ptx::ld_global_f32(logits + token), p.scale)", "ptx::ld_global_f32(logits + token)", shows_in=FORWARD),
    Mutation("the first row's sum", _KERNEL, "p.lse + row", "p.lse", shows_in=BACKWARD),
    Mutation("the first row's factor", _KERNEL, "p.factors + row", "p.factors", shows_in=BACKWARD),
    Mutation("no column is the token's", _KERNEL, "== token ? 1.f : 0.f", "== token ? 0.f : 0.f", shows_in=BACKWARD),
    Mutation("gradients are written before all have loaded", _KERNEL, "      ptx::syncthreads();  // all threads have loaded their logits\n", "", shows_in=BACKWARD),
    Mutation("gradients behind the last are written", _KERNEL, "if (first + column_of(i) < p.columns)\n          ptx::st", "ptx::st", shows_in=BACKWARD),
    Mutation("columns of a lane follow each other", _KERNEL, "i / 4 * (4 * kLanes) + i % 4", "i"),
]  # fmt: skip
