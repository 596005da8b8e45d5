// One product: cluster i takes tiles i, i + clusters, ... of the raster. All roles of a CTA find its tiles by themselves.
//
// A cluster that multicasts takes two neighbouring tiles: along n if it shares A, along m if it shares B. If their number
// is odd the last one lies outside D, unless it is moved up; its loads give zeros and its stores are clipped. CTAs that
// split k take the same tile.
#pragma once
#include "config.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include DESTINATION

struct WorkStorage {
  DEVICE void init() {}
};

DEVICE void prefetch_operand_maps(const Params& p) {
  ptx::prefetch_tensormap(&p.map_a);
  ptx::prefetch_tensormap(&p.map_b);
  if constexpr (kHasScales) ptx::prefetch_tensormap(&p.map_sfa);
  if constexpr (kSfbIsPerRow) ptx::prefetch_tensormap(&p.map_sfb);
  if constexpr (kSkipsMid) ptx::prefetch_tensormap(&p.map_right_d);
}

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
};

using TileToLoad = Tile;

struct Tiles {
  uint32_t rows, tiles_m, tiles_n, next_tile;

  DEVICE Tiles(const Params& p, WorkStorage&)
      : rows(p.m),
        tiles_m(ceil_div(ceil_div(p.m, kBlockM), kClusterM)),
        tiles_n(ceil_div(ceil_div(p.n, kBlockN), kClusterN)),
        next_tile(ptx::block_index() / kClusterSize) {}

  // By the loading thread, or a math warp.
  DEVICE bool next(Tile& tile) {
    if (next_tile >= tiles_m * tiles_n) return false;
    const TileIndex index = place_in_raster(next_tile, tiles_m, tiles_n);
    tile.row_m = tile_of_cta<kClusterM>(index.m) * kBlockM;
    tile.row_n = tile_of_cta<kClusterN>(index.n) * kBlockN;
    // C must be added once, so no row may be computed again. Where rows are contiguous, boxes begin at whole 16 bytes.
    if constexpr (!kWithC && !kAddsToD && !kAIsMnMajor) move_up(tile.row_m, rows, kBlockM);
    next_tile += ptx::grid_size() / kClusterSize;
    return true;
  }

  // By the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; next(tile);) load(tile);
  }

  DEVICE void find_for_others(uint32_t) {}

  DEVICE void finish(Tile&) {}
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile&) { return KBlocks(p.k); }

using Share = WholeShare;

// ---- Loads

// Boxes of A and its scales have no more rows than A: TMA takes longer to fill a row outside with zeros than to load one.
// What lies in the slot behind them is multiplied, and not stored.
DEVICE uint32_t bytes_of_slot(const Params& p, const Tile&) {
  const uint32_t rows = (!kAIsMnMajor && p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA) * kClusterN;
  const uint32_t scales = kHasScales && kScaleParts == 1 && p.m < kBlockM ? ceil_div(p.m, 4) * 4 : kBlockM;  // 16 bytes are the least that TMA loads
  return kSlotBytes - (kBlockM - rows) * kLineBytes - (kBlockM - scales) * 4;
}

struct TileLoad {
  const Params& p;
  const Tile& tile;
  uint32_t slot_bytes;

  DEVICE TileLoad(const Params& p_, const Tile& tile_) : p(p_), tile(tile_), slot_bytes(bytes_of_slot(p_, tile_)) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t k) const {
    load_operand<kAIsMnMajor, kBlockM, kClusterN>(&p.map_a, slot.full, slot.a, k, tile.row_m);
#pragma unroll
    for (uint32_t row = 0; row < kBlockN; row += kBoxRowsOfB)
      load_operand<kBIsMnMajor, kBoxRowsOfB, kClusterM>(&p.map_b, slot.full_of_b, slot.b + row * kLineBytes, k / kPackedB,
                                                        tile.row_n + row);
    if constexpr (kHasScales) load_scales(slot, k_block);
  }

  DEVICE void load_scales(const Slot& slot, uint32_t k_block) const {
    ptx::tma_load_2d(&p.map_sfa, slot.full, slot.scales, tile.row_m, k_block * kScaleParts);
    if constexpr (kSfbIsPerRow)
      ptx::tma_load_2d(&p.map_sfb, slot.full, slot.scales + kScaleParts * kScaleRows, tile.row_n, k_block * kScalePartsOfB);
  }
};

// ---- B's scales, C and D

DEVICE const float* sfb_of(const Params& p, const Tile&) { return p.sfb; }
DEVICE const uint8_t* c_of(const Params& p, const Tile&) { return p.c; }
DEVICE uint32_t skipped_scales(const Tile&) { return 0; }
