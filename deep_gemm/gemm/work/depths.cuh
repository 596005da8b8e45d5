// Products of several groups along k (weight gradients of experts): D[g] = C[g] + A_g @ B_g.T, each with its own depth.
//
// A_g is row-major [m, k_g], so groups have different pitches, and each group needs its own tensor maps of A_g and B_g.
// Another kernel, k_group_maps, makes these maps before this one reads them. Scales and D have one map for all groups.
//
// The loading thread finds a CTA's tiles and passes them to the math warps through a queue.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include "work/k_scheduler.cuh"
#include "work/tile_queue.cuh"

struct Params : Product {
  KGroups groups;
};

struct WorkStorage {
  TileQueue queue;
  NumberMail mail;

  DEVICE void init() {
    queue.init(kNumMathWarps);  // the math warps take tiles from it
    if constexpr (kClusterSize > 1) mail.init();
  }
};

DEVICE void prefetch_operand_maps(const Params& p) {
  ptx::prefetch_tensormap(&p.map_sfa);
  ptx::prefetch_tensormap(&p.map_sfb);
}

// ---- Tiles

// Marks the end of the tiles: no group can have this number of k-blocks. (A group may have 0.)
constexpr Tile kNoMoreTiles = {0, 0, 0xffffffff, 0};

struct Tiles {
  const Params& p;
  WorkStorage& storage;
  uint32_t number = 0;  // the number of tiles that this thread has dealt or taken

  DEVICE Tiles(const Params& p_, WorkStorage& storage_) : p(p_), storage(storage_) {}

  // Called by the loading thread. It prefetches the next tile's maps before it loads this tile's operands.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    KScheduler scheduler(p.groups, p.m, p.n, storage.mail);
    TileToLoad tile, coming;
    bool is_coming = scheduler.next(coming);
    while (is_coming) {
      tile = coming;
      if (kAddsToD && tile.num_k_blocks == 0) break;  // no later tile has anything to add either
      deal(tile);
      is_coming = scheduler.next(coming);
      load(tile);
    }
    deal(kNoMoreTiles);
  }

  DEVICE void find_for_others(uint32_t) {}

  DEVICE void deal(const Tile& tile) {
    storage.queue.deal(number, {tile.row_m, tile.row_n, tile.num_k_blocks, tile.group});
    ++number;
  }

  // Called by a math warp: reads the next tile's depth. The rest stays in the queue for now, because registers are few.
  DEVICE bool next(Tile& tile) {
    storage.queue.wait_until_dealt(number);
    tile.num_k_blocks = ptx::ld_shared_b32(&storage.queue.tile(number)->z);
    // One result for the warp, or ptxas expects ring positions to differ by lane, and moves descriptors one by one.
    return ptx::all_sync(tile.num_k_blocks != kNoMoreTiles.num_k_blocks);
  }

  // Reads the position of the tile that was multiplied.
  DEVICE void finish(Tile& tile) {
    const ptx::Uint4 dealt = ptx::ld_shared_v4_b32(storage.queue.tile(number));
    ptx::syncwarp();  // all lanes have read
    tile = {dealt.x, dealt.y, dealt.z, dealt.w & kGroupOfWord};
    storage.queue.give_back(number, dealt.x, ptx::lane_index() == 0);
    ++number;
  }
};

DEVICE KBlocks k_blocks_of(const Params&, const Tile& tile) { return KBlocks(tile.num_k_blocks * kBlockK); }
DEVICE KBlocks k_blocks_of(const Params&, const TileToLoad& tile) { return KBlocks(0, tile.num_k_blocks); }

using Share = WholeShare;

// ---- Loads

struct TileLoad {
  static constexpr uint32_t slot_bytes = kSlotBytes;
  static constexpr bool kIsShared = kClusterN > 1;  // the CTAs of the cluster share A
  const Params& p;
  const TileToLoad& tile;
  uint32_t first_row, row_m;  // each CTA of a cluster loads a part of A, and of A's scales, into this slot of both CTAs

  DEVICE TileLoad(const Params& p_, const TileToLoad& tile_)
      : p(p_), tile(tile_), first_row(kIsShared ? ptx::cluster_rank() * kBoxRowsOfA : 0), row_m(tile.row_m + first_row) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t) const {
    load_box<kIsShared>(&tile.k_group->map_a, slot.full, slot.a + first_row * kBlockK, k_block * kBlockK, row_m);
    load_box<kIsShared>(&p.map_sfa, slot.full, slot.scales + first_row, row_m, tile.first_k_block + k_block);
    ptx::tma_load_2d(&tile.k_group->map_b, slot.full, slot.b, k_block * kBlockK, tile.row_n);
    ptx::tma_load_2d(&p.map_sfb, slot.full, slot.scales + kScaleRows, tile.row_n, tile.first_k_block + k_block);
  }
};

// ---- B's scales, C and D

DEVICE const float* sfb_of(const Params& p, const Tile&) { return p.sfb; }
DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) {
  return p.c + tile.group * p.groups.c_stride * kOutputBytes;
}
DEVICE uint32_t skipped_scales(const Tile&) { return 0; }

DEVICE uint32_t plane_of(const Params&, const Tile& tile) { return tile.group; }

#include "epilogue/to_plane.cuh"
