// Casts 128x128 tiles of a matrix x [m, k]; cast/tile.cuh lists the outputs.
//
// A CTA casts one tile. It issues all its loads before it uses the first.
#pragma once
#include "cast/tile.cuh"
#include "tile_cast_params_layout.cuh"  // asserts that core/params.py has the same layout

using SharedStorage = TileStorage;
static_assert(sizeof(SharedStorage) == kSharedBytes, "TileCastConfig.shared_bytes and TileStorage differ");

DEVICE void load_tile(const TileCastParams& p, Tile& tile) {
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) {
    const uint32_t x_row = tile.row + tile.row_of(i);
    tile.pieces[i] = load_piece(p.x + uint64_t{x_row} * p.x_pitch, x_row < p.m, tile.column, p.k, tile.lane);
  }
}

// Returns the parameters of a tile's matrix, if x is several matrices [m, k]. `tile` becomes the tile in this matrix.
DEVICE TileCastParams matrix_of(const TileCastParams& p, BlockOfRows& tile) {
  const uint32_t tiles_m = ceil_div(p.m, kBlock), matrix = tile.row / tiles_m;
  tile.row -= matrix * tiles_m;
  TileCastParams found = p;
  found.x += uint64_t{matrix} * p.m * p.x_pitch;
  if (p.values != nullptr) found.values += uint64_t{matrix} * p.m * p.values_pitch;
  found.columns += uint64_t{matrix} * p.k * p.columns_pitch;
  found.scales += uint64_t{matrix} * tiles_m * p.scales_stride_m;
  return found;
}

DEVICE void load_and_cast(SharedStorage& shared, const TileCastParams& p, const BlockOfRows& at) {
  Tile tile(at);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  load_tile(p, tile);
  cast_any_tile(shared, p, tile);
}

KERNEL(kNumThreads, kCtasPerSm) cast_tiles(GRID_CONSTANT TileCastParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  BlockOfRows at(ptx::block_index(), ceil_div(p.k, kBlock), p.block_reciprocal);
  if constexpr (kTurnsBlocks) {
    const TileCastParams matrix = matrix_of(p, at);
    load_and_cast(shared, matrix, at);
  } else {
    load_and_cast(shared, p, at);
  }
}
