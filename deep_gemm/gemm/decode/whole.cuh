// B in E4M3, if no scale changes along k: partial sums are added unscaled, and the totals are scaled.
#pragma once
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "factors.cuh"

using ScaleStorage = float[4];  // unused: all scales are in registers

// Multiplies this CTA's k-blocks.
template <typename Storage>
DEVICE void multiply(const DecodeProduct& p, Storage& shared, const Work& work, RingPosition& at, float (&total)[kAccumulators]) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index();
  float of_tokens[ceil_div(kBlockTokens, 32)], of_rows[2];  // of every 32nd token; of this thread's rows of B
  load_scales(of_tokens, p.sfa, p.sfa_stride_m, work.row_m + lane, 32, p.m);
  load_scales(of_rows, p.sfb, p.sfb_stride_n, work.row_n + warp * 16 + lane / 4, 8, p.n);
  const uint32_t b_address = ptx::smem_address(shared.b) + warp / 4 * 64 * kBlockK, a_address = ptx::smem_address(shared.a);
#pragma unroll
  for (float& x : total) x = 0;
  multiply_k_blocks<false>(
      shared.ring, b_address, [&](uint32_t, uint32_t stage) { return a_address + stage * kABytes; }, nullptr,
      work.end_k_block - work.k_block, at, total);
  multiply_by_scales(total, of_tokens, of_rows);
}
