// One product: cluster i computes tiles i, i + clusters, ... of the raster. Each role of a CTA finds them by itself.
//
// A cluster that multicasts computes two neighbouring tiles: along n if it shares A, along m if it shares B. If tiles
// are odd in number, the last tile is outside D, unless it begins earlier; it loads zeros, and its stores are cut
// off. CTAs that split k compute the same tile.
#pragma once
#include "config.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "ptx/tma.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include DESTINATION

struct WorkStorage {
  DEVICE void init() {}
};

DEVICE void prefetch_operand_maps(const Params& p) {
  prefetch_maps(p);
  if constexpr (kSkipsMid) ptx::prefetch_tensormap(&p.map_right_d);
}

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
};

using TileToLoad = Tile;

struct Tiles : Raster {
  DEVICE Tiles(const Params& p, WorkStorage&) : Raster(p.m, p.n) {}

  // Called by the loading thread, or by a math warp.
  DEVICE bool next(Tile& tile) {
    if (next_tile >= tiles_m * tiles_n) return false;
    take(tile, next_tile);
    return true;
  }

  // Called by the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; next(tile);) load(tile);
  }
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile&) { return KBlocks(p.k); }

using Share = WholeShare;

// ---- Loads

struct TileLoad : LoadOfBoxes<Params, Tile> {
  using LoadOfBoxes::LoadOfBoxes;

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t k) const {
    load_operands(slot, k);
    load_scales(slot, k_block);
  }
};

// ---- B's scales, C and D

DEVICE const float* sfb_of(const Params& p, const Tile&) { return p.sfb; }
DEVICE const uint8_t* c_of(const Params& p, const Tile&) { return p.c; }
DEVICE uint32_t skipped_scales(const Tile&) { return 0; }
