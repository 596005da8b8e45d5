// Products of several groups along k (weight gradients of experts): D[g] = C[g] + A_g @ B_g.T, each of a depth of its own.
//
// A_g is row-major [m, k_g]: the pitch of its rows is the group's own, and so its tensor map must be, as that of B_g. A
// kernel of its own, k_group_maps, makes these maps ahead of this one. Scales and D have one map for all.
//
// The loading thread finds a CTA's tiles and hands them to the math warps through a queue.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
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
    queue.init(kNumMathWarps);  // the math warps take
    if constexpr (kClusterSize > 1) mail.init();
  }
};

DEVICE void prefetch_operand_maps(const Params& p) {
  ptx::prefetch_tensormap(&p.map_sfa);
  ptx::prefetch_tensormap(&p.map_sfb);
}

// ---- Tiles

// What follows the last tile has so many k-blocks: a group may have none, but not so many.
constexpr Tile kNoMoreTiles = {0, 0, 0xffffffff, 0};

// By the loading thread. `number` counts the tiles that were dealt before.
DEVICE void deal(TileQueue& queue, uint32_t& number, const Tile& tile) {
  const uint32_t slot = number % kTileSlots;
  ptx::mbarrier_wait_parity(&queue.empty[slot], (number / kTileSlots & 1) ^ 1);
  ptx::st_shared_v4_b32(&queue.tiles[slot], tile.row_m, tile.row_n, tile.num_k_blocks, tile.group);
  ptx::mbarrier_arrive(&queue.full[slot]);
  ++number;
}

// By a warp: reads a tile that is there, and gives the slot back.
DEVICE void take(TileQueue& queue, uint32_t& number, Tile& tile) {
  const uint32_t slot = number % kTileSlots;
  const ptx::Uint4 dealt = ptx::ld_shared_v4_b32(&queue.tiles[slot]);
  ptx::syncwarp();  // all lanes have read
  tile = {dealt.x, dealt.y, dealt.z, dealt.w & kGroupOfWord};
  ptx::mbarrier_arrive_after(&queue.empty[slot], dealt.x, ptx::lane_index() == 0);
  ++number;
}

struct Tiles {
  DEVICE Tiles(const Params&, WorkStorage&) {}
};

// The next tile's maps are on their way while this one's operands are loaded.
constexpr bool kFindsWhileLoading = true;
template <typename Shared>
DEVICE void find_and_load(const Params& p, Shared& shared, RingPosition& at) {
  WorkStorage& storage = shared.work;
  KScheduler scheduler(p.groups, p.m, p.n, storage.mail);
  TileToLoad tile, coming;
  uint32_t dealt = 0;
  bool is_coming = scheduler.next(coming);
  while (is_coming) {
    tile = coming;
    if (kAddsToD && tile.num_k_blocks == 0) break;  // nor has any other tile something to add
    deal(storage.queue, dealt, tile);
    is_coming = scheduler.next(coming);
    load_tile(p, shared, tile, at);
  }
  deal(storage.queue, dealt, kNoMoreTiles);
}

template <bool kIsWarp>
DEVICE bool next_tile(WorkStorage& storage, Tiles&, Tile& tile, uint32_t& number) {
  const uint32_t slot = number % kTileSlots;
  ptx::mbarrier_wait_parity(&storage.queue.full[slot], number / kTileSlots & 1);
  tile.num_k_blocks = ptx::ld_shared_b32(&storage.queue.tiles[slot].z);
  // One answer for the warp, or ptxas takes ring positions for different in its lanes, and moves descriptors one by one.
  return ptx::all_sync(tile.num_k_blocks != kNoMoreTiles.num_k_blocks);
}

// Takes the place of the tile that was multiplied last, which stayed in the queue for want of registers.
constexpr bool kTakesLate = true;
DEVICE void take_place(WorkStorage& storage, Tile& tile, uint32_t& number) { take(storage.queue, number, tile); }

DEVICE void deal_tiles(const Params&, WorkStorage&, Tiles&, Tile&, uint32_t&, uint32_t) {}

DEVICE KBlocks k_blocks_of(const Params&, const Tile& tile) { return KBlocks(tile.num_k_blocks * kBlockK); }
DEVICE KBlocks k_blocks_of(const Params&, const TileToLoad& tile) { return KBlocks(0, tile.num_k_blocks); }

// A warpgroup computes its rows of every tile, all of them.
constexpr bool kMayBeLow = false;
constexpr bool kHasParts = false;

DEVICE bool rows_end_at(const Tile&, uint32_t) { return false; }

template <typename EndsAt>
DEVICE bool is_part_of(const Tile&, uint32_t, const EndsAt&) {
  return false;
}
DEVICE float (&units_of_part(float (&total)[kUnitsPerWarpgroup][kUnitN / 2]))[kUnitsPerWarpgroup][kUnitN / 2] {
  return total;
}

// ---- Loads

// A box of A, or of its scales, for both CTAs if they share A.
DEVICE void load_shared(const ptx::TensorMap* map, uint64_t* full, void* to, uint32_t x, uint32_t y) {
  if constexpr (kClusterN > 1)
    ptx::tma_load_2d_multicast(map, full, to, x, y, kAllCtas);
  else
    ptx::tma_load_2d(map, full, to, x, y);
}

struct TileLoad {
  static constexpr uint32_t slot_bytes = kSlotBytes;
  const Params& p;
  const TileToLoad& tile;
  uint32_t first_row, row_m;  // each CTA of a cluster loads its part of A, and of A's scales, into the same slot of both

  DEVICE TileLoad(const Params& p_, const TileToLoad& tile_)
      : p(p_), tile(tile_), first_row(kClusterN > 1 ? ptx::cluster_rank() * kBoxRowsOfA : 0), row_m(tile.row_m + first_row) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t) const {
    load_shared(&tile.k_group->map_a, slot.full, slot.a + first_row * kBlockK, k_block * kBlockK, row_m);
    load_shared(&p.map_sfa, slot.full, slot.scales + first_row, row_m, tile.first_k_block + k_block);
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

DEVICE bool has_rows(const Tile&, uint32_t, uint32_t) { return true; }

DEVICE void store_panel_of(const Params& p, const Tile& tile, const Span& span, const uint8_t* panel, uint32_t column,
                           uint32_t row, bool) {
  if constexpr (kPanelIsWide)
    store_panel(&p.map_d, panel, 0, span.at_column(column), row, tile.group);
  else
    store_panel(&p.map_d, panel, column, row, tile.group);
}

DEVICE void prefetch_panel_of(const Params& p, const Tile& tile, const Span& span, uint32_t column, uint32_t row) {
  if constexpr (kPanelIsWide)
    ptx::tma_prefetch_4d(&p.map_d, 0, span.at_column(column), row, tile.group);
  else
    ptx::tma_prefetch_3d(&p.map_d, column, row, tile.group);
}
