// B in E4M3, if no scale changes along k: runs.cuh.
#pragma once
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "runs.cuh"

using ScaleStorage = float[4];  // all are in registers

// Multiplies this CTA's k-blocks.
template <typename Storage>
DEVICE void multiply(const DecodeProduct& p, Storage& shared, const Work& work, RingPosition& at, float (&total)[kAccumulators]) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index();
  float of_tokens[ceil_div(kBlockTokens, 32)], of_rows[2];  // of every 32nd token; of the thread's rows of B
  load_scales(of_tokens, p.sfa, p.sfa_stride_m, work.row_m + lane, 32, p.m);
  load_scales(of_rows, p.sfb, p.sfb_stride_n, work.row_n + warp * 16 + lane / 4, 8, p.n);
  const RunOperands operands = {ptx::smem_descriptor_low(ptx::smem_address(shared.b) + warp / 4 * 64 * kBlockK),
                                ptx::smem_descriptor_low(ptx::smem_address(shared.a)), kBBytes / 16, kABytes / 16};
  multiply_runs<kBlockTokens>(shared.ring, operands, work.end_k_block - work.k_block, at, total);
#pragma unroll
  for (uint32_t i = 0; i < kAccumulators; ++i) {
    const uint32_t token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    total[i] = ptx::mul_rn(total[i], ptx::shfl_sync(of_tokens[i / 16], token % 32) * of_rows[i / 2 % 2]);
  }
}
