// D (FP32, 64 x kN) = A @ B.T of BF16 operands in either major. One warpgroup loads 64 columns of k at a time into one slot.
#pragma once
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

// An operand is stored in boxes of 64 rows: K-major rows hold 64 elements of k; MN-major rows are rows of k and hold 64
// elements. K-major boxes follow each other like rows. An MN-major operand's descriptor has the distance between boxes.
constexpr uint32_t kBoxBytes = 64 * 128, kBoxesOfB = ceil_div(kN, 64);

struct SharedStorage {
  alignas(1024) uint8_t a[kBoxBytes], b[kBoxesOfB][kBoxBytes];
  uint64_t full;
};

struct Params {
  ptx::TensorMap map_a, map_b;
  float* d;
  uint32_t k;
};

KERNEL(128, 1) wgmma_bf16_kernel(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  if (ptx::thread_index() == 0) {
    ptx::mbarrier_init(&shared.full, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
  const uint32_t a_address = ptx::smem_address(shared.a), b_address = ptx::smem_address(shared.b);
  const uint32_t a = kAIsMnMajor ? ptx::mn_major_descriptor_low(a_address, kBoxBytes) : ptx::smem_descriptor_low(a_address);
  const uint32_t b = kBIsMnMajor ? ptx::mn_major_descriptor_low(b_address, kBoxBytes) : ptx::smem_descriptor_low(b_address);
  float d[kN / 2];
  for (uint32_t k = 0, parity = 0; k < p.k; k += 64, parity ^= 1) {
    if (ptx::thread_index() == 0) {
      ptx::mbarrier_arrive_expect_tx(&shared.full, (1 + kBoxesOfB) * kBoxBytes);
      ptx::tma_load_2d(&p.map_a, &shared.full, shared.a, kAIsMnMajor ? 0 : k, kAIsMnMajor ? k : 0);
      for (uint32_t i = 0; i < kBoxesOfB; ++i)
        ptx::tma_load_2d(&p.map_b, &shared.full, shared.b[i], kBIsMnMajor ? i * 64 : k, kBIsMnMajor ? k : i * 64);
    }
    ptx::mbarrier_wait_parity(&shared.full, parity);
    ptx::syncwarp();
    ptx::fence_registers(d);
    ptx::wgmma_fence();
    ptx::wgmma_m64k64_bf16<kN, kAIsMnMajor, kBIsMnMajor>(d, a, b, k != 0);
    ptx::wgmma_commit_group();
    ptx::fence_registers(d);
    ptx::wgmma_wait_group<0>();
    ptx::syncthreads();  // all threads have read the slot
  }
  const uint32_t row = ptx::warp_index() * 16 + ptx::lane_index() / 4, column = ptx::lane_index() % 4 * 2;
#pragma unroll
  for (uint32_t i = 0; i < kN / 2; i += 2)
    ptx::st_global_v2_f32(p.d + (row + i / 2 % 2 * 8) * kN + i / 4 * 8 + column, d[i], d[i + 1]);
}
