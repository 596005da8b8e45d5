// Casts of 128x128 tiles of a matrix x [m, k]: cast/tile.cuh says to what.
//
// A CTA takes a tile, and all of its loads are under way before it looks at the first.
#pragma once
#include "cast/tile.cuh"
#include "tile_cast_params_layout.cuh"  // asserts that it lies as core/params.py packs it

using SharedStorage = TileStorage;
static_assert(sizeof(SharedStorage) == kSharedBytes, "TileCastConfig.shared_bytes and TileStorage differ");

DEVICE void load_tile(const TileCastParams& p, Tile& tile) {
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) {
    const uint32_t x_row = tile.row + tile.row_of(i);
    tile.pieces[i] = load_piece(p.x + uint64_t{x_row} * p.x_pitch, x_row < p.m, tile.column, p.k, tile.lane);
  }
}

KERNEL(kNumThreads, kCtasPerSm) cast_tiles(GRID_CONSTANT TileCastParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  Tile tile(BlockOfRows(ptx::block_index(), ceil_div(p.k, kBlock), p.block_reciprocal));
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait
  load_tile(p, tile);
  cast_any_tile(shared, p, tile);
}
