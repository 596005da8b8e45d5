// Products of E4M3, by one math warpgroup, if no scale changes along k. Tensor cores' sums have few bits, so FP32 adds them up:
//
//   a run of kRunKBlocks k-blocks --> WGMMA, from zero      total += the run's sum
//
// Behind the last run, totals are multiplied with round(sfa * sfb). Scales are loaded ahead of the first: each lane has some.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"

// Scales of rows `first`, `first + step` and so on. Past the last row the last one's: never an address outside.
template <uint32_t kCount>
DEVICE void load_scales(float (&to)[kCount], const float* sf, uint64_t stride, uint32_t first, uint32_t step, uint32_t rows) {
#pragma unroll
  for (uint32_t i = 0, row = first; i < kCount; ++i, row += step) to[i] = ptx::ld_global_f32(sf + (row < rows ? row : rows - 1) * stride);
}

// 64 rows of one operand and N of the other: descriptors (their low words) in the ring's first slot, and from slot to slot.
struct RunOperands {
  uint32_t of_64, of_n, next_64, next_n;
};

// Adds up the products of the next `left` k-blocks as they arrive. One is multiplied while the next is issued.
template <uint32_t N>
DEVICE void multiply_runs(Ring& ring, const RunOperands& operands, uint32_t left, RingPosition& at, float (&total)[N / 2]) {
#pragma unroll
  for (float& x : total) x = 0;
#pragma unroll 1
  while (left != 0) {
    const uint32_t count = left < kRunKBlocks ? left : kRunKBlocks;
    RingPosition last = at;
    float sum[N / 2];
    if constexpr (kCudaRelease < 1209) {  // see kStoresAtOnce in tile.cuh
#pragma unroll
      for (float& x : sum) x = 0;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
      wait_until_loaded(ring, at);
      const uint32_t a = operands.of_64 + at.stage * operands.next_64, b = operands.of_n + at.stage * operands.next_n;
      ptx::wgmma_fence();
#pragma unroll
      for (uint32_t k = 0; k < kBlockK / 16; k += 2)
        ptx::wgmma_m64k32_e4m3<N>(sum, ptx::smem_descriptor_from_low(a + k), ptx::smem_descriptor_from_low(b + k), (i | k) != 0);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (i != 0) release(ring, last, ptx::lane_index());
      last = at;
      at = at.next();
    }
    ptx::wgmma_wait_group<0>();
    ptx::fence_registers(sum);  // or what reads them might be moved ahead of the wait
    release(ring, last, ptx::lane_index());
#pragma unroll
    for (uint32_t i = 0; i < N / 2; ++i) total[i] = ptx::add_rn(total[i], sum[i]);
    left -= count;
  }
}
