// Code that work/heads.cuh and work/sums.cuh share: D is several planes of one shape, each with its own tiles. All
// tiles of a plane precede the next plane's; the rest is as in work/dense.cuh. A file that includes this one
// defines Params and planes_of(p) first.
//
// A cluster that multicasts computes two neighbouring tiles of a plane: along n if it shares A, along m if it shares B.
#pragma once
#include "config.cuh"
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

struct Tiles : Raster {
  uint32_t planes;

  DEVICE Tiles(const Params& p, WorkStorage&) : Raster(p.m, p.n), planes(planes_of(p)) {}

  // Called by the loading thread, or by a math warp.
  DEVICE bool next(Tile& tile) {
    const uint32_t tiles_of_plane = tiles_m * tiles_n;
    if (next_tile >= tiles_of_plane * planes) return false;
    tile.plane = next_tile / tiles_of_plane;
    take(tile, next_tile - tile.plane * tiles_of_plane);
    return true;
  }

  // Called by the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; next(tile);) load(tile);
  }
};

using Share = WholeShare;

DEVICE uint32_t plane_of(const Params&, const Tile& tile) { return tile.plane; }

#include "epilogue/to_plane.cuh"
