// What work/heads.cuh and work/sums.cuh share: D is several planes of one shape, each in tiles of its own. Tiles of a plane
// follow each other, and those of the next plane follow them; else this is work/dense.cuh. A file that includes this defines
// Params before, and planes_of(p).
//
// A cluster that multicasts takes two neighbouring tiles of a plane: along n if it shares A, along m if it shares B.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "slot.cuh"
#include "tile.cuh"

struct WorkStorage {
  DEVICE void init() {}
};

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
  uint32_t plane;
};

using TileToLoad = Tile;

struct Tiles {
  uint32_t rows, tiles_m, tiles_n, planes, next_tile;

  DEVICE Tiles(const Params& p, WorkStorage&)
      : rows(p.m),
        tiles_m(ceil_div(ceil_div(p.m, kBlockM), kClusterM)),
        tiles_n(ceil_div(ceil_div(p.n, kBlockN), kClusterN)),
        planes(planes_of(p)),
        next_tile(ptx::block_index() / kClusterSize) {}

  // By the loading thread, or a math warp.
  DEVICE bool next(Tile& tile) {
    const uint32_t tiles_of_plane = tiles_m * tiles_n;
    if (next_tile >= tiles_of_plane * planes) return false;
    tile.plane = next_tile / tiles_of_plane;
    const TileIndex index = place_in_raster(next_tile - tile.plane * tiles_of_plane, tiles_m, tiles_n);
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

using Share = WholeShare;

// ---- Loads

// Boxes of A and its scales have no more rows than A, as in work/dense.cuh.
DEVICE uint32_t bytes_of_slot(const Params& p, const Tile&) {
  const uint32_t rows = (!kAIsMnMajor && p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA) * kClusterN;
  const uint32_t scales = kHasScales && p.m < kBlockM ? ceil_div(p.m, 4) * 4 : kBlockM;  // 16 bytes are the least that TMA loads
  return kSlotBytes - (kBlockM - rows) * kLineBytes - (kBlockM - scales) * 4;
}

DEVICE uint32_t plane_of(const Params&, const Tile& tile) { return tile.plane; }

#include "epilogue/to_plane.cuh"
