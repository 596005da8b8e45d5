// B in E4M3, if no scale changes along k: runs of k-blocks are added up, and scaled at last, as in mainloop_of_runs.cuh.
#pragma once
#include "config.cuh"
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "run.cuh"

using ScaleStorage = float[4];  // all are in registers

// Multiplies this CTA's k-blocks. Scales past the last row or token are the last one's: never an address outside.
template <typename Storage>
DEVICE void multiply(const DecodeProduct& p, Storage& shared, const Work& work, RingPosition& at, float (&total)[kAccumulators]) {
  const uint32_t lane = ptx::lane_index(), first_row = work.row_n + ptx::warp_index() * 16 + lane / 4;
  float of_tokens[ceil_div(kBlockTokens, 32)], of_rows[2];  // of every 32nd token; of the thread's two rows
#pragma unroll
  for (uint32_t i = 0; i < ceil_div(kBlockTokens, 32); ++i) {
    const uint32_t token = work.row_m + i * 32 + lane;
    of_tokens[i] = ptx::ld_global_f32(p.sfa + static_cast<uint64_t>(token < p.m ? token : p.m - 1) * p.sfa_stride_m);
  }
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t row = first_row + i * 8;
    of_rows[i] = ptx::ld_global_f32(p.sfb + static_cast<uint64_t>(row < p.n ? row : p.n - 1) * p.sfb_stride_n);
  }
  const RunOperands operands = {ptx::smem_descriptor_low(ptx::smem_address(shared.b) + ptx::warp_index() / 4 * 64 * kBlockK),
                                ptx::smem_descriptor_low(ptx::smem_address(shared.a)), kBBytes / 16, kABytes / 16};
#pragma unroll
  for (float& x : total) x = 0;
#pragma unroll 1
  for (uint32_t first = work.k_block; first < work.end_k_block; first += kRunKBlocks) {
    const uint32_t left = work.end_k_block - first;
    float sum[kAccumulators];
    multiply_run<kBlockTokens>(shared.ring, operands, left < kRunKBlocks ? left : kRunKBlocks, at, sum);
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; ++i) total[i] = ptx::add_rn(total[i], sum[i]);
  }
#pragma unroll
  for (uint32_t i = 0; i < kAccumulators; ++i) {
    const uint32_t token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    total[i] = ptx::mul_rn(total[i], ptx::shfl_sync(of_tokens[i / 16], token % 32) * of_rows[i / 2 % 2]);
  }
}
