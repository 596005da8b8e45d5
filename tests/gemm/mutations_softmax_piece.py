"""Mistakes in the kernel that reads one piece of logits, and the trials that must notice them."""

from __future__ import annotations

from dataclasses import replace

from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds.epilogues import BLOCK_SUMS
from deep_gemm.gemm.kinds.output import FP32
from deep_gemm.gemm.softmax_piece import BACKWARD, FORWARD
from lab.sim.block_sums import Bf16BlockSumsTrial, BlockSumsTrial
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
    Mutation("sums are not scaled", _KERNEL, "sum_of_block(x, p.scale)", "sum_of_block(x, 1)", shows_in=FORWARD),
    Mutation("gradients are not scaled", _KERNEL, "ptx::mul_rn(x[i], p.scale)", "x[i]", shows_in=BACKWARD),
    Mutation("the largest of a lane alone", _KERNEL, "most = ptx::max_f32(most, ptx::shfl_xor_sync(most, bits))", "most += 0", shows_in=FORWARD),
    Mutation("the first number is the largest", _KERNEL, "most = ptx::max_f32(most, x[i])", "most += 0", shows_in=FORWARD),
    Mutation("the last number is left out", _KERNEL, "i = 0; i < kHeld; ++i) sums", "i = 1; i < kHeld; ++i) sums", shows_in=FORWARD),
    Mutation("the sum of a lane alone", _KERNEL, "sum = ptx::add_rn(sum, ptx::shfl_xor_sync(sum, bits))", "sum += 0", shows_in=FORWARD),
    Mutation("half of the lanes' sums", _KERNEL, "ptx::add_rn(sum, ptx::shfl_xor_sync(sum, 1))", "sum", shows_in=FORWARD),
    Mutation("half of a lane's numbers", _KERNEL, "ptx::add_rn(sums[0], sums[1])", "sums[0]", shows_in=FORWARD),
    Mutation("a logarithm to the base of 2", "lanes.cuh", "most), kLogOf2", "most), 1.f", shows_in=FORWARD),
    Mutation("powers of 2", "lanes.cuh", "ptx::mul_rn(factor, kLog2OfE)", "factor", shows_in=FORWARD),
    Mutation("an infinite exponent is subtracted", "lanes.cuh", "ptx::max_f32(ptx::mul_rn(largest, scale), kLeast)", "ptx::mul_rn(largest, scale)", shows_in=FORWARD),
    Mutation("powers of 2 of gradients", _KERNEL, "ptx::mul_rn(ptx::mul_rn(x[i], p.scale) - lse, Powers::kLog2OfE)", "ptx::mul_rn(x[i], p.scale) - lse", shows_in=BACKWARD),
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

IN_PRODUCT = replace(FP32, epilogue=BLOCK_SUMS)
IN_PRODUCT_TRIALS = [
    Bf16BlockSumsTrial(bf16_config(128, 256, IN_PRODUCT), 140, 328, 72, 1),
    Bf16BlockSumsTrial(bf16_config(256, 128, IN_PRODUCT, cluster_n=2), 260, 328, 72, 2),
    BlockSumsTrial(tile_config(128, 256, IN_PRODUCT, k=128), 71, 300, 144, 3),
]
_SUMS = "epilogue/block_sums.cuh"
IN_PRODUCT_MUTATIONS = [
    Mutation("tiles behind the last column are written", _SUMS, "          if (column >= p.n) continue;\n", ""),
    Mutation("columns behind the last one count", _SUMS, "p.n - column >= kBlock ?", "true ?"),
    Mutation("the last column does not count", _SUMS, "column + column_of(i) < p.n", "column + column_of(i) + 1 < p.n"),
    Mutation("rows behind the last are written", _SUMS, "if (row < p.m && ptx::lane_index() % 4 == 0)", "if (ptx::lane_index() % 4 == 0)"),
    Mutation("one unit's rows", _SUMS, " + row_of_unit(unit)", ""),
    Mutation("one half's rows", _SUMS, " + half * 8;", ";"),
    Mutation("one warpgroup's rows", _SUMS, "ptx::warp_index() * 16", "ptx::warp_index() % 4 * 16"),
    Mutation("one unit's columns", _SUMS, "column_of_unit(unit) + block;", "block;"),
    Mutation("one block of a unit", _SUMS, "column_of_unit(unit) + block;", "column_of_unit(unit);"),
    Mutation("the first block's logits", _SUMS, "[block / 2 + i / 2", "[i / 2"),
    Mutation("the upper rows' logits", _SUMS, "half * 2 + i % 2]", "i % 2]"),
    Mutation("sums have no pitch", _SUMS, "row * p.d_pitch", "row * ceil_div(p.n, kBlock)"),
    Mutation("tokens count from the vocabulary's first", _SUMS, "ptx::ld_global_b32(p.tokens + row) - p.first", "ptx::ld_global_b32(p.tokens + row)"),
    Mutation("a token behind the last column is chosen", _SUMS, "token < p.n && token / kBlock", "token / kBlock"),
    Mutation("another block's token is chosen", _SUMS, " && token / kBlock == column / kBlock", ""),
    Mutation("the chosen logit is not scaled", _SUMS, "ptx::mul_rn(logit(i), p.scale)", "logit(i)"),
    Mutation("another lane's token", _SUMS, " + ptx::lane_index() % 4 * 2 + i % 2", " + i % 2"),
    Mutation("sums are not scaled", _SUMS, "powers(most, p.scale)", "powers(most, 1)"),
    Mutation("the largest of a lane alone", _SUMS, "most = ptx::max_f32(most, ptx::shfl_xor_sync(most, bits))", "most += 0"),
    Mutation("the sum of a lane alone", _SUMS, "sum = ptx::add_rn(sum, ptx::shfl_xor_sync(sum, bits))", "sum += 0"),
    Mutation("a fourth of a lane's numbers", _SUMS, "ptx::add_rn(ptx::add_rn(sums[0], sums[1]), ptx::add_rn(sums[2], sums[3]))", "sums[0]"),
]  # fmt: skip
