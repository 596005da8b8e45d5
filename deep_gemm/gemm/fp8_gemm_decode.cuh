// D = C + A @ B.T for few rows of A, the tokens of a decode step. FP8 operands have fine-grained scales; accumulation has
// two levels. Such a product takes as long as loading B, so all SMs must load at once, and many bytes at a time:
//
//   producer, one thread         for each k-block:       empty --wait--> TMA B, A --bytes--> full
//   math, 1 or 2 warpgroups      for 32 k-blocks:        sfa * sfb -> shared memory
//                                for each k-block:       full --wait--> WGMMA, promote --arrive--> empty
//                                after the last k-block: accumulators --cluster--> sums -> transposed -> D
//
// decode/tile.cuh has a CTA's work, the loop over k-blocks, and the code that stores D. decode/product.cuh has the
// parameters of one product or of several. config.cuh names the file that multiplies B: decode/e4m3.cuh,
// decode/fine.cuh, decode/whole.cuh or decode/e2m1.cuh.
#pragma once
#include "config.cuh"
#include "decode/tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include DECODE_WORK
#include DECODE_B
#include "params_layout.cuh"  // asserts that the layout of Params is what core/params.py packs

struct SharedStorage {
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(1024) uint8_t a[kNumStages][kSlotBlocks * kABytes];  // rows past the box are not written, and their results not stored
  alignas(128) float exchange[kClusterK > 1 ? exchange_floats(kAccumulators) : 4];
  ScaleStorage scales;
  Ring ring;
  uint64_t received;  // barrier of `exchange`
  Tiles::Storage work;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "DecodeConfig.shared_bytes and SharedStorage differ");
static_assert(kClusterK > 1 || !Tiles::kIsOnly || sizeof(SharedStorage::b) >= kBlockTokens * kBlockN * 4, "the ring must hold a tile");

// One product or several: Params, and CtaWork, which is a CTA's current Work, with its head or group if it has one.
static_assert(requires(const Params& p, SharedStorage& shared, Tiles::Storage& storage, Tiles& tiles, CtaWork& work, RingPosition& at,
                       void load_tile(const CtaWork&, RingPosition&, bool), float (&total)[kAccumulators], uint32_t row, uint32_t k) {
  storage.init();             // shared memory for tiles, by one thread
  Tiles(p, shared);           // the CTA's tiles: OneTile of decode/tile.cuh, or more if not kIsOnly
  Tiles::kIsOnly;
  tiles.load_all(load_tile);  // by the producer's warp: calls `load_tile` with each tile, and whether it is the first
  tiles.next(work);           // by a math warp: false after the last tile
  tiles.store(product_of(p, work), shared, work, total);  // pointers, pitches and sizes of its head's or group's product
  load_box<true>(&p.map_b, shared.ring.full, shared.b[0], k, row, work);  // makes TMA load a box of B, or else of A
  column_of_d(product_of(p, work), row);  // the column of D that stores a column of the product
}, "DECODE_WORK");
// How B is multiplied, with ScaleStorage in shared memory.
static_assert(requires(const Params& p, SharedStorage& shared, CtaWork& work, RingPosition& at, float (&total)[kAccumulators]) {
  multiply(product_of(p, work), shared, work, at, total);  // by the math warps: sums up this CTA's k-blocks
}, "DECODE_B");

// Loads a tile's k-blocks, kSlotBlocks into each slot of the ring. Loads B of the first tile early, if it is ready.
DEVICE void load_k_blocks(const Params& p, SharedStorage& shared, const CtaWork& work, RingPosition& at, bool is_first) {
  const auto load_b = [&](uint32_t i, uint32_t stage) {
    ptx::mbarrier_arrive_expect_tx(&shared.ring.full[stage], p.slot_bytes);
    load_box<true>(&p.map_b, &shared.ring.full[stage], shared.b[stage], i * (kBlockK / kSlotBlocks), work.row_n, work);
  };
  const auto load_a = [&](uint32_t i, uint32_t stage) {
#pragma unroll
    for (uint32_t block = 0; block < kSlotBlocks; ++block)
      load_box<false>(&p.map_a, &shared.ring.full[stage], shared.a[stage] + block * kABytes, (i + block) * kBlockK, work.row_m, work);
  };
  uint32_t i = work.k_block;
  if (is_first) {
    uint32_t end_ahead = work.k_block;
    if (p.weight_is_ready) {
      const uint32_t count = work.end_k_block - work.k_block;
      end_ahead += count < kNumStages * kSlotBlocks ? count : kNumStages * kSlotBlocks;
#pragma unroll 1
      for (uint32_t stage = 0; stage * kSlotBlocks < end_ahead - work.k_block; ++stage)
        load_b(work.k_block + stage * kSlotBlocks, stage);
    }
    // After this wait, results of the previous kernel can be read. B may be such a result, unless `weight_is_ready`.
    ptx::griddepcontrol_wait();
#pragma unroll 1
    for (; i < end_ahead; i += kSlotBlocks, at = at.next()) load_a(i, at.stage);
  }
  for (; i < work.end_k_block; i += kSlotBlocks, at = at.next()) {
    wait_until_free(shared.ring, at);
    load_b(i, at.stage);
    load_a(i, at.stage);
  }
}

KERNEL(kNumThreads, kCtasPerSm) fp8_gemm_decode(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  Tiles tiles(p, shared);
  const bool is_producer = ptx::warp_index() == kNumMathWarps;

  if (is_producer && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_b);
    ptx::prefetch_tensormap(&p.map_a);
    shared.work.init();
    init_barriers(shared, tiles.work);
  }
  ptx::syncthreads();
  if constexpr (kClusterK > 1) ptx::cluster_arrive_relaxed();  // this CTA runs, so others may write to it

  if (is_producer) {
    tiles.load_all([&](const CtaWork& work, RingPosition& at, bool is_first) { load_k_blocks(p, shared, work, at, is_first); });
    if constexpr (kClusterK > 1) ptx::cluster_wait();
  } else {
    RingPosition at;
    ptx::griddepcontrol_wait();
    for (CtaWork work; tiles.next(work);) {
      const auto& product = product_of(p, work);
      float total[kAccumulators];
      multiply(product, shared, work, at, total);
      ptx::griddepcontrol_launch_dependents();
      if constexpr (kClusterK > 1) ptx::cluster_wait();
      tiles.store(product, shared, work, total);
    }
  }
}
