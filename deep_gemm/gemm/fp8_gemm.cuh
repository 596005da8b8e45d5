// D = C + A @ B.T of FP8 operands with fine-grained scales, by two-level accumulation. Persistent and warp-specialized:
//
//   producer, one thread      for each tile, for each k-block:   empty --wait--> TMA A, sfa, B --bytes--> full
//   converting, 0 to 8 warps  in between, if WGMMA cannot read B as stored, or scales of B must be copied: see CONVERT
//   math, 1 to 3 warpgroups   for each tile, for each k-block:   full --wait--> WGMMA, promote --arrive--> empty
//                             after the last k-block:            accumulators -> shared memory --TMA--> D
//   storing, 0 to 2 warps     if rows have addresses: shared memory -> D (epilogue/store_rows.cuh)
//
// A math warpgroup owns kBlockM / kNumMathWarpgroups rows of the tile and multiplies them in units of 64 x kUnitN. A
// thread's registers hold one or two units' partial sums at a time, and the totals of all units.
#pragma once
#include "config.cuh"
#include "kinds.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "params_layout.cuh"  // asserts the layout of Params that core/params.py packs

struct RoleStorage : ConvertStorage {  // ConvertStorage may be empty
  WorkStorage work;
};

struct SharedStorage {
  OutputStorage output;
  alignas(1024) uint8_t a[kNumStages][kABytes];
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(kHasScales ? 128 : 4) float scales[kNumStages][kScales];
  Ring ring;
  OutputBarriers output_barriers;
  RoleStorage roles;

  DEVICE Slot slot(uint32_t stage) {
    uint64_t* const full = &ring.full[stage];
    return {full, roles.full_of_b(full, stage), a[stage], b[stage], scales[stage]};
  }
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "GemmConfig.shared_bytes and SharedStorage differ");

// Producer, one thread: loads the k-blocks of one tile, each into the next slot of the ring.
DEVICE void load_tile(const Params& p, SharedStorage& shared, const TileToLoad& tile, RingPosition& at, Passes& passes) {
  const KBlocks k_blocks = k_blocks_of(p, tile);
  const TileLoad load(p, tile);
  do {
    for (uint32_t k_block = k_blocks.first; k_block < k_blocks.end; ++k_block, at = at.next()) {
      const uint32_t k = k_block * kBlockK;
      wait_until_free(shared.ring, at);
      const Slot slot = shared.slot(at.stage);
      ptx::mbarrier_arrive_expect_tx(slot.full, load.slot_bytes);
      if constexpr (kConvertWarps > 0) ptx::mbarrier_arrive_expect_tx(slot.full_of_b, kPackedBytes);
      load.load_slot(slot, k_block, k);
      prefetch_d(p, tile, k_block, k_blocks.end);
    }
  } while (passes.again<false>());
}

// Called by a math warp: releases the slots of a tile that has no work for its warpgroup.
DEVICE void skip_tile(const Params& p, Ring& ring, const Tile& tile, RingPosition& at, Passes& passes) {
  do {
    for (uint32_t k_block = 0; k_block < k_blocks_of(p, tile).end; ++k_block, at = at.next()) {
      wait_until_loaded(ring, at);
      ptx::syncwarp();
      release(ring, at, ptx::lane_index());
    }
  } while (passes.again<true>());
}

// For epilogues whose math warps store all of D themselves: no other warps store (kStoringWarps == 0).
template <typename... Any>
DEVICE void store_tiles(Any&&...) {}

// Profilers find a product by its kernel's name, so config.cuh defines KERNEL_NAME: fp8_gemm_dense, and so on.
KERNEL(kNumThreads, 1) KERNEL_NAME(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warpgroup = ptx::shfl_sync(ptx::thread_index() / 128, 0);  // tells the compiler that it is uniform
  const bool is_producer = warpgroup == kNumMathWarpgroups;

  if (ptx::warp_index() == 0 && ptx::elect_sync()) {
    prefetch_operand_maps(p);
    prefetch_output_map(p);
    shared.output_barriers.init();
    shared.roles.work.init();
    shared.roles.init();
    shared.ring.init(kFinishingWarps);
  }
  // No CTA may load into another's slots, or arrive at its barriers, before they are initialized.
  // CTAs that split k need not meet before they add up sums.
  if constexpr (kStartsAlone) ptx::syncthreads(), ptx::cluster_arrive_relaxed();
  else if constexpr (kClusterSize > 1) ptx::cluster_sync(); else ptx::syncthreads();

  // With set_pdl this kernel may have started before the previous one ended. It goes on only after that kernel's end.
  ptx::griddepcontrol_wait();

  Tiles tiles(p, shared.roles.work);
  Passes passes(shared.roles);
  RingPosition at;
  // Read before registers move between roles: ptxas puts shuffles where lanes may diverge into code that both roles
  // share, and this code takes registers which the producer's warps no longer have (an illegal instruction on an H200).
  const uint32_t warp = ptx::warp_index() % 4;
  if (is_producer) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0 && ptx::elect_sync()) {
      tiles.load_all([&](const TileToLoad& tile) { load_tile(p, shared, tile, at, passes); });
      ptx::griddepcontrol_launch_dependents();
      // Wait before leaving: the other CTA arrives at this CTA's barriers until this CTA's last slots are free.
      if constexpr (kMulticastCtas > 1)
        for (uint32_t i = 0; i < kNumStages; ++i, at = at.next()) wait_until_free(shared.ring, at);
    }
    if (kScalingWarps > 0 && warp >= 4 - kScalingWarps) scale_tiles(p, shared, tiles, warp - (4 - kScalingWarps));
    if (kStoringWarps > 0 && warp >= 4 - kStoringWarps)
      store_tiles(p, shared.output, shared.output_barriers, tiles, warp - (4 - kStoringWarps));
    tiles.find_for_others(warp);
  } else if (kConvertWarps > 0 && warpgroup > kNumMathWarpgroups) {
    convert_tiles(p, shared, tiles, warpgroup - kNumMathWarpgroups - 1);
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    const Operands operands(shared.a[0], shared.b[0], shared.scales[0], warpgroup);
    Output output(shared.output, shared.output_barriers, warpgroup);
    Totals total;
    FirstScales first_scales;
    Share share;  // this warpgroup's share of the last multiplied tile
    Tile tile;
    while (true) {
      // Takes the next tile, and loads its first scales, before the last tile's totals are stored: otherwise the
      // next tile's first product would wait for these scales.
      if (!kStoresAtOnce && share.is_any) tiles.finish(tile);
      const Tile done = tile;
      const bool is_tile = tiles.next(tile);
      if (is_tile) begin_scales(p, tile, first_scales);
      if (!kStoresAtOnce && share.is_any) share.with(total, [&](auto& units) { output.store_tile(p, done, units); });
      if (!is_tile) break;
      share.set(tile, warpgroup);
      output.expect(p, tile);
      if (share.is_any)
        share.with(total, [&](auto& units) { multiply_tile(p, shared.ring, operands, first_scales, tile, at, passes, share, output, units); });
      else
        skip_tile(p, shared.ring, tile, at, passes);
      if (kStoresAtOnce && share.is_any) {
        tiles.finish(tile);
        share.with(total, [&](auto& units) { output.store_tile(p, tile, units); });
      }
    }
    output.finish();
  }
  leave();
}
