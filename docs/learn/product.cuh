// D = A @ B.T for Hopper: FP8 operands, D in BF16. A has a scale for each row and 128 columns, B for each 128x128 block.
//
//   producer, one thread   empty --wait--> TMA A, sfa, B --bytes--> full
//   math, 2 warpgroups     full --wait--> WGMMA, promote --arrive--> empty
//                          at the end of a tile: registers -> shared memory -> TMA -> D
//
// In a cluster of two, CTAs with neighbouring rows of tiles share B: each CTA loads half of B into both CTAs.
#pragma once
#include "config.cuh"  // kBlockN, kNumStages, kClusterSize, kSharedBytes
#include "types.cuh"

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

struct Params {
  ptx::TensorMap map_a, map_b, map_sfa, map_d;
  const float* sfb;
  uint32_t m, n, k;
};
#include "params_layout.cuh"  // asserts that Python packs the struct in this way

constexpr uint32_t kBlockM = 128, kBlockK = 128, kNumMathWarps = 8, kNumThreads = 384;
static_assert(128 % kBlockN == 0, "a tile's columns lie under one scale of B");
constexpr uint32_t kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr uint32_t kStageBytes = kABytes + kBBytes + kBlockM * 4;
constexpr uint32_t kPanelColumns = kBlockN < 64 ? kBlockN : 64;
constexpr uint32_t kPanelRowBytes = kPanelColumns * 2, kPanelBytes = 64 * kPanelRowBytes;

struct SharedStorage {
  alignas(1024) uint8_t d[2][64 * kBlockN * 2];  // panels of each math warpgroup
  alignas(1024) uint8_t a[kNumStages][kABytes];
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(128) float sfa[kNumStages][kBlockM];
  uint64_t full[kNumStages], empty[kNumStages];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "Python's plan of shared memory");

struct RingPosition {
  uint32_t stage = 0, parity = 0;
  DEVICE void advance() {
    if (++stage == kNumStages) stage = 0, parity ^= 1;
  }
};

// Tiles of a CTA. The row of tiles changes first, so that the two CTAs of a cluster take the same columns.
struct Tiles {
  uint32_t tiles_m, tiles_n, next;
  DEVICE Tiles(const Params& p)
      : tiles_m(ceil_div(ceil_div(p.m, kBlockM), kClusterSize) * kClusterSize),
        tiles_n(ceil_div(p.n, kBlockN)),
        next(ptx::block_index()) {}
  DEVICE bool take(uint32_t& row_m, uint32_t& row_n) {
    if (next >= tiles_m * tiles_n) return false;
    row_m = next % tiles_m * kBlockM;
    row_n = next / tiles_m * kBlockN;
    next += ptx::grid_size();
    return true;
  }
};

DEVICE void load_tiles(const Params& p, SharedStorage& shared) {
  RingPosition at;
  Tiles tiles(p);
  uint32_t row_m, row_n;
  while (tiles.take(row_m, row_n)) {
    for (uint32_t k = 0; k < p.k; k += kBlockK) {
      uint64_t* full = &shared.full[at.stage];
      ptx::mbarrier_wait_parity(&shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, kStageBytes);
      ptx::tma_load_2d(&p.map_a, full, shared.a[at.stage], k, row_m);
      ptx::tma_load_2d(&p.map_sfa, full, shared.sfa[at.stage], row_m, k / kBlockK);
      if constexpr (kClusterSize > 1) {
        constexpr uint32_t kRows = kBlockN / kClusterSize;
        const uint32_t first = ptx::cluster_rank() * kRows;
        ptx::tma_load_2d_multicast(&p.map_b, full, shared.b[at.stage] + first * kBlockK, k, row_n + first, 3);
      } else {
        ptx::tma_load_2d(&p.map_b, full, shared.b[at.stage], k, row_n);
      }
      at.advance();
    }
  }
  // Before this CTA exits, the other CTA must have arrived at this CTA's barriers.
  if constexpr (kClusterSize > 1)
    for (uint32_t i = 0; i < kNumStages; ++i, at.advance())
      ptx::mbarrier_wait_parity(&shared.empty[at.stage], at.parity ^ 1);
}

DEVICE void multiply_tile(const Params& p, SharedStorage& shared, RingPosition& at, uint32_t row_n,
                          float (&total)[kBlockN / 2]) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index(), warpgroup = warp / 4;
  const uint32_t row = warp * 16 + lane / 4, k_blocks = ceil_div(p.k, kBlockK);
#pragma unroll
  for (float& x : total) x = 0;
  for (uint32_t k_block = 0; k_block < k_blocks; ++k_block) {
    const float sfb = ptx::ld_global_nc_f32(p.sfb + row_n / 128 * k_blocks + k_block);
    ptx::mbarrier_wait_parity(&shared.full[at.stage], at.parity);
    const float sfa[2] = {ptx::ld_shared_f32(&shared.sfa[at.stage][row]),
                          ptx::ld_shared_f32(&shared.sfa[at.stage][row + 8])};
    const uint32_t a = ptx::smem_address(shared.a[at.stage]) + warpgroup * 64 * kBlockK;
    const uint32_t b = ptx::smem_address(shared.b[at.stage]);
    float partial[kBlockN / 2];
    ptx::fence_registers(partial);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t k = 0; k < kBlockK; k += 32)
      ptx::wgmma_m64k32_e4m3<kBlockN>(partial, ptx::smem_descriptor(a + k), ptx::smem_descriptor(b + k), k != 0);
    ptx::wgmma_commit_group();
    ptx::fence_registers(partial);
    ptx::wgmma_wait_group<0>();
    // One lane releases the slot, once the last value that the warp loaded from it has arrived.
    if constexpr (kClusterSize > 1)
      ptx::mbarrier_arrive_cluster_after(&shared.empty[at.stage], lane % kClusterSize, sfa[1], lane < kClusterSize);
    else
      ptx::mbarrier_arrive_after(&shared.empty[at.stage], sfa[1], lane == 0);
#pragma unroll
    for (uint32_t i = 0; i < kBlockN / 2; ++i) total[i] = ptx::fma(partial[i], sfa[i / 2 % 2] * sfb, total[i]);
    at.advance();
  }
}

DEVICE void store_tile(const Params& p, SharedStorage& shared, uint32_t row_m, uint32_t row_n,
                       const float (&total)[kBlockN / 2]) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index(), warpgroup = warp / 4;
  const bool is_storing_thread = warp % 4 == 0 && lane == 0;
  uint8_t* panels = shared.d[warpgroup];
  if (is_storing_thread) ptx::tma_store_wait_read<0>();
  ptx::bar_sync(1 + warpgroup, 128);
  const uint32_t row = warp % 4 * 16 + lane % 16;
#pragma unroll
  for (uint32_t first = 0; first < kBlockN; first += 16) {
    const uint32_t column = first + lane / 16 * 8;
    uint32_t offset = row * kPanelRowBytes + column % kPanelColumns * 2;
    offset ^= offset >> 3 & (kPanelRowBytes - 16);
    const float* v = total + first / 2;
    ptx::stmatrix_x4(panels + column / kPanelColumns * kPanelBytes + offset, ptx::pack_bf16(v[0], v[1]),
                     ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
  }
  ptx::fence_proxy_async_shared();
  ptx::bar_sync(1 + warpgroup, 128);
  if (is_storing_thread) {
    for (uint32_t column = 0; column < kBlockN; column += kPanelColumns)
      ptx::tma_store_2d(&p.map_d, panels + column / kPanelColumns * kPanelBytes, row_n + column,
                        row_m + warpgroup * 64);
    ptx::tma_store_commit();
  }
}

KERNEL(kNumThreads, 1) product(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warp = ptx::warp_index();
  if (warp == 0 && ptx::elect_sync()) {
    for (uint32_t i = 0; i < kNumStages; ++i) {
      ptx::mbarrier_init(&shared.full[i], 1);
      ptx::mbarrier_init(&shared.empty[i], kClusterSize * kNumMathWarps);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (kClusterSize > 1) ptx::cluster_sync(); else ptx::syncthreads();
  if (warp >= kNumMathWarps) {
    ptx::setmaxnreg_dec<40>();
    if (warp == kNumMathWarps && ptx::elect_sync()) load_tiles(p, shared);
  } else {
    ptx::setmaxnreg_inc<232>();
    RingPosition at;
    Tiles tiles(p);
    uint32_t row_m, row_n;
    while (tiles.take(row_m, row_n)) {
      float total[kBlockN / 2];
      multiply_tile(p, shared, at, row_n, total);
      store_tile(p, shared, row_m, row_n, total);
    }
    if (warp % 4 == 0 && ptx::lane_index() == 0) ptx::tma_store_wait_read<0>();
  }
}
