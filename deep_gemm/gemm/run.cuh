// A run of k-blocks of E4M3, by one math warpgroup, in one set of the tensor cores' accumulators, if no scale changes along k.
#pragma once
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"

// 64 rows of one operand and N of the other: descriptors (their low words) in the ring's first slot, and from slot to slot.
struct RunOperands {
  uint32_t of_64, of_n, next_64, next_n;
};

// Adds up the products of the next `count` k-blocks, at least one, from zero. One is multiplied while the next is issued.
template <uint32_t N>
DEVICE void multiply_run(Ring& ring, const RunOperands& operands, uint32_t count, RingPosition& at, float (&sum)[N / 2]) {
  RingPosition last = at;
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
}
