// D = C + A @ B.T, FP8 operands with fine-grained scales, two-level accumulation. Persistent and warp-specialized:
//
//   producer, one thread      for each tile, for each k-block:   empty --wait--> TMA A, sfa, B --bytes--> full
//   math, 2 or 3 warpgroups   for each tile, for each k-block:   full --wait--> WGMMA, promote --arrive--> empty
//                             after the last k-block:            accumulators -> shared memory --TMA--> D
//
// A math warpgroup owns kBlockM / kNumMathWarpgroups rows of the tile and works through them in units of 64 x kUnitN:
// one unit's partial sums are in the tensor cores' registers at a time, the totals of all units beside them.
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"
#include "scaling.cuh"
#include "scheduler.cuh"
#include "store.cuh"

struct Params {
  ptx::TensorMap map_a, map_b, map_sfa, map_d;
  const float* sfb;
  const uint8_t* c;
  uint64_t c_pitch;  // in elements
  uint32_t sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
};

// Operand tiles are rows of 128 bytes, swizzled in atoms of 8 rows: 1024 bytes, to which their addresses are aligned.
constexpr uint32_t kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr uint32_t kSlotBytes = kABytes + kBBytes + kBlockM * 4;

struct SharedStorage {
  alignas(1024) uint8_t d[kNumMathWarpgroups][kNumStoreBuffers * kStoreBufferBytes];
  alignas(1024) uint8_t a[kNumStages][kABytes];
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(128) float sfa[kNumStages][kBlockM];
  Ring ring;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "GemmConfig.shared_bytes and SharedStorage differ");

// Loads the k-blocks of one tile, each into the next slot of the ring.
DEVICE void load_tile(const Params& p, SharedStorage& shared, const Tile& tile, RingPosition& at) {
  for (uint32_t k = 0; k < p.k; k += kBlockK, at = at.next()) {
    wait_until_free(shared.ring, at);
    uint64_t* full = &shared.ring.full[at.stage];
    ptx::mbarrier_arrive_expect_tx(full, kSlotBytes);
    // Each CTA of a cluster loads its part of the shared operand into the same slot of both.
    if constexpr (kClusterN > 1) {
      constexpr uint32_t kRows = kBlockM / kClusterN;
      const uint32_t first = ptx::cluster_rank() * kRows;
      ptx::tma_load_2d_multicast(&p.map_a, full, shared.a[at.stage] + first * kBlockK, k, tile.row_m + first, kAllCtas);
    } else {
      ptx::tma_load_2d(&p.map_a, full, shared.a[at.stage], k, tile.row_m);
    }
    if constexpr (kClusterM > 1) {
      constexpr uint32_t kRows = kBlockN / kClusterM;
      const uint32_t first = ptx::cluster_rank() * kRows;
      ptx::tma_load_2d_multicast(&p.map_b, full, shared.b[at.stage] + first * kBlockK, k, tile.row_n + first, kAllCtas);
    } else {
      ptx::tma_load_2d(&p.map_b, full, shared.b[at.stage], k, tile.row_n);
    }
    ptx::tma_load_2d(&p.map_sfa, full, shared.sfa[at.stage], tile.row_m, k / kBlockK);
  }
}

// Multiplies one unit of one slot: 64 rows of A by kUnitN rows of B, 128 deep, from zero.
DEVICE void issue_unit(float (&partial)[kUnitN / 2], uint32_t a_address, uint32_t b_address) {
#pragma unroll
  for (float& x : partial) ptx::fence_register(x);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kBlockK; k += 32)  // 32 values of k are 32 bytes into the swizzled rows
    ptx::wgmma_m64k32_e4m3<kUnitN>(partial, ptx::smem_descriptor(a_address + k), ptx::smem_descriptor(b_address + k),
                                   k != 0);
  ptx::wgmma_commit_group();
#pragma unroll
  for (float& x : partial) ptx::fence_register(x);
}

// Multiplies the k-blocks of one tile as they arrive, and promotes each into `total`.
DEVICE void multiply_tile(const Params& p, SharedStorage& shared, const Tile& tile, RingPosition& at, uint32_t warpgroup,
                          float (&total)[kUnitsPerWarpgroup][kUnitN / 2]) {
  const uint32_t lane = ptx::lane_index();
  const uint32_t first_row = warpgroup * kRowsPerWarpgroup + ptx::warp_index() % 4 * 16 + lane / 4;
  const uint32_t num_k_blocks = ceil_div(p.k, kBlockK);
#pragma unroll
  for (auto& unit : total)
#pragma unroll
    for (float& x : unit) x = 0;

  BlockScales block_scales(p.sfb, p.sfb_stride_n, p.sfb_stride_k, tile.row_n, p.n, num_k_blocks);
  bool is_loaded = false;  // known already that the slot at hand is
  for (uint32_t first_k_block = 0; first_k_block < num_k_blocks; first_k_block += 32) {
    block_scales.advance(first_k_block);
    const uint32_t count = num_k_blocks - first_k_block < 32 ? num_k_blocks - first_k_block : 32;
#pragma unroll 1
    for (uint32_t k_block = 0; k_block < count; ++k_block) {
      float sfb[kScalesPerTile];
      block_scales.of_k_block(k_block, sfb);
      if (!is_loaded) wait_until_loaded(shared.ring, at);
      const RingPosition after = at.next();
#pragma unroll
      for (uint32_t unit = 0; unit < kUnitsPerWarpgroup; ++unit) {
        const uint32_t row = unit / kUnitsAlongN * 64, column = unit % kUnitsAlongN * kUnitN;
        const float sfa[2] = {ptx::ld_shared_f32(&shared.sfa[at.stage][first_row + row]),
                              ptx::ld_shared_f32(&shared.sfa[at.stage][first_row + row + 8])};
        float partial[kUnitN / 2];
        issue_unit(partial,
                   ptx::smem_address(shared.a[at.stage]) + (warpgroup * kRowsPerWarpgroup + row) * kBlockK,
                   ptx::smem_address(shared.b[at.stage]) + column * kBlockK);
        const bool is_last_unit = unit + 1 == kUnitsPerWarpgroup;
        // While the tensor cores work, ask for the next slot; one answer for the warp, which WGMMA needs converged.
        if (is_last_unit)
          is_loaded = ptx::all_sync(ptx::mbarrier_test_wait_parity(&shared.ring.full[after.stage], after.parity));
        ptx::wgmma_wait_group<0>();
        if (is_last_unit) release(shared.ring, at, lane);
        promote(total[unit], partial, sfa, block_scales, sfb, column);
      }
      at = after;
    }
  }
}

KERNEL(kNumThreads, 1) fp8_gemm_kernel(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warpgroup = ptx::shfl_sync(ptx::thread_index() / 128, 0);  // uniform, which the compiler cannot see
  const bool is_producer = warpgroup == kNumMathWarpgroups;

  if (ptx::warp_index() == 0 && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_a);
    ptx::prefetch_tensormap(&p.map_b);
    ptx::prefetch_tensormap(&p.map_sfa);
    ptx::prefetch_tensormap(&p.map_d);
    shared.ring.init();
  }
  // No CTA may load into another's slots, or arrive at its barriers, before they are initialized.
  if constexpr (kClusterSize > 1) ptx::cluster_sync(); else ptx::syncthreads();

  Scheduler scheduler(p.m, p.n);
  RingPosition at;
  Tile tile;
  if (is_producer) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (ptx::warp_index() % 4 == 0 && ptx::elect_sync()) {
      while (scheduler.next(tile)) load_tile(p, shared, tile, at);
      // The other CTA still arrives at this one's barriers until its last slots are free.
      if constexpr (kClusterSize > 1)
        for (uint32_t i = 0; i < kNumStages; ++i, at = at.next()) wait_until_free(shared.ring, at);
    }
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    uint32_t store_buffer = 0;
    while (scheduler.next(tile)) {
      float total[kUnitsPerWarpgroup][kUnitN / 2];
      multiply_tile(p, shared, tile, at, warpgroup, total);
      const uint32_t row_m = tile.row_m + warpgroup * kRowsPerWarpgroup;
      if constexpr (kWithC)
#pragma unroll  // `total` stays in registers only while its indices are known at compile time
        for (uint32_t unit = 0; unit < kUnitsPerWarpgroup; ++unit)
          add_c(total[unit], p.c, p.c_pitch, row_m + unit / kUnitsAlongN * 64 + ptx::warp_index() % 4 * 16,
                tile.row_n + unit % kUnitsAlongN * kUnitN, p.m, p.n, ptx::lane_index());
      store_tile(&p.map_d, shared.d[warpgroup], store_buffer, total, row_m, tile.row_n, warpgroup);
    }
    if (ptx::warp_index() % 4 == 0 && ptx::lane_index() == 0) ptx::tma_store_wait_read<0>();
  }
}
