// Products of several groups along k, with operands contiguous along m and n: D[g] = C[g] + A_g.T @ B_g. The groups'
// parts of A [sum of k, m] and B [sum of k, n] are consecutive, so one map serves all; parts are whole k-blocks. The
// host passes the parts' first k-blocks as parameters, the deepest part first: the last round's tiles are the shortest.
//
// A cluster that multicasts computes two neighbouring tiles of a group: along n if it shares A, along m if it shares B.
#pragma once
#include "config.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "slot.cuh"
#include "tile.cuh"

constexpr uint32_t kMostKParts = 128;

struct KParts {
  uint64_t c_stride;  // from one group's C to the next, in elements
  uint32_t count;
  uint32_t first_k_block[kMostKParts], num_k_blocks[kMostKParts];
  uint32_t group[kMostKParts];  // plane of C and D
};

struct Params : Product {
  KParts parts;
};

struct WorkStorage {
  DEVICE void init() {}
};

DEVICE void prefetch_operand_maps(const Params& p) { prefetch_maps(p); }

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
  uint32_t part;
};

using TileToLoad = Tile;

struct Tiles : Raster {
  const KParts& parts;

  DEVICE Tiles(const Params& p, WorkStorage&) : Raster(p.m, p.n), parts(p.parts) {}

  // Called by the loading thread, or by a math warp.
  DEVICE bool next(Tile& tile) {
    const uint32_t tiles_of_part = tiles_m * tiles_n;
    if (next_tile >= tiles_of_part * parts.count) return false;
    tile.part = next_tile / tiles_of_part;
    if (kAddsToD && parts.num_k_blocks[tile.part] == 0) return false;  // no later tile has anything to add either
    take(tile, next_tile - tile.part * tiles_of_part);
    return true;
  }

  // Called by the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; next(tile);) load(tile);
  }
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile& tile) { return KBlocks(0, p.parts.num_k_blocks[tile.part]); }

using Share = WholeShare;

// ---- Loads

struct TileLoad : LoadOfBoxes<Params, Tile> {
  uint32_t first_k;

  DEVICE TileLoad(const Params& p, const Tile& tile)
      : LoadOfBoxes(p, tile), first_k(p.parts.first_k_block[tile.part] * kBlockK) {}

  DEVICE void load_slot(const Slot& slot, uint32_t, uint32_t k_of_part) const { load_operands(slot, first_k + k_of_part); }
};

// ---- C and D

DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) {
  return p.c + p.parts.group[tile.part] * p.parts.c_stride * kOutputBytes;
}

DEVICE uint32_t plane_of(const Params& p, const Tile& tile) { return p.parts.group[tile.part]; }

#include "epilogue/to_plane.cuh"
