// Casts for the backward pass of s = silu(gate) * up. Inputs are rows of gate and up side by side, ds (the gradient of
// s without the row's weight), and the row's weight.
//
//   the first tiles   cast the gradient of gate and up, along rows and along columns
//   the other tiles   cast s along columns, and sum s * ds for each row and tile; these sums are the weight's gradient
//
// Numbers are rounded to BF16 before the cast.
#pragma once
#include "cast/silu_gradient.cuh"

using Storage = TileStorage;

// A lane's pieces of one row.
struct GatesOfRow {
  Piece gate, up, ds;
};

// Calls `compute(i, row, of_row)` for each row of a thread; `row` counts from the group's first. Loads half of the rows
// at a time, because registers cannot hold all. `column`: the tile's first column within gate, up or ds.
template <typename Compute>
DEVICE void for_each_row(const DepthsCastParams& p, const Group& group, const Tile& tile, uint32_t column, Compute compute) {
  constexpr uint32_t kAtOnce = kTeamRows / 2;
  const uint32_t half = p.k / 2;
#pragma unroll
  for (uint32_t first = 0; first < kTeamRows; first += kAtOnce) {
    GatesOfRow loaded[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t row = tile.row + tile.row_of(first + i);
      const bool is_there = row < group.rows;
      const uint8_t* gate = p.x + uint64_t{group.first_row + row} * p.x_pitch;
      const uint8_t* ds = p.ds + uint64_t{group.first_row + row} * p.ds_pitch;
      loaded[i] = {load_piece(gate, is_there, column, half, tile.lane),
                   load_piece(gate + uint64_t{half} * kInputBytes, is_there, column, half, tile.lane),
                   load_piece(ds, is_there, column, half, tile.lane)};
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) compute(first + i, tile.row + tile.row_of(first + i), loaded[i]);
  }
}

DEVICE void cast_gradient(const DepthsCastParams& p, Storage& shared, const Group& group, uint32_t block) {
  Tile tile = tile_of(group, block * kBlock);
  const uint32_t half = p.k / 2;
  const bool is_up = tile.column + column_of(tile.lane, 0) >= half;  // equal for all columns of the lane
  for_each_row(p, group, tile, is_up ? tile.column - half : tile.column, [&](uint32_t i, uint32_t row, const GatesOfRow& of_row) {
    const float weight = weight_of(p, group, row);
    store_elements(tile.pieces[i], [&](uint32_t e) {
      const Silu silu = silu_of(element_of(of_row.gate, e), element_of(of_row.up, e), p.limit);
      return ptx::mul_rn(ptx::mul_rn(element_of(of_row.ds, e), weight), is_up ? silu.by_up : silu.by_gate);
    });
  });
  cast_any_tile(shared, gradient_target_of(p, group), tile);
}

DEVICE void cast_activation(const DepthsCastParams& p, Storage& shared, const Group& group, uint32_t block) {
  Tile tile = tile_of(group, block * kBlock);
  float* sums = p.sums + uint64_t{block} * p.rows + group.first_row;
  for_each_row(p, group, tile, tile.column, [&](uint32_t i, uint32_t row, const GatesOfRow& of_row) {
    float sum = 0.f;
    store_elements(tile.pieces[i], [&](uint32_t e) {
      const float s = silu_of(element_of(of_row.gate, e), element_of(of_row.up, e), p.limit).s;
      sum += ptx::mul_rn(s, element_of(of_row.ds, e));
      return s;
    });
#pragma unroll
    for (uint32_t distance = 1; distance < kLanes; distance *= 2) sum += ptx::shfl_sync(sum, ptx::lane_index() ^ distance);
    if (tile.lane == 0 && row < group.rows) ptx::st_global_f32(sums + row, sum);
  });
  const uint32_t half = p.k / 2;
  cast_any_tile<false>(shared, target_of(group, p.activated, p.activated_scales, p.activated_stride_of_block, half), tile);
}

DEVICE void cast_tile_of(const DepthsCastParams& p, Storage& shared, const Group& group, uint32_t block) {
  if (block < p.gradient_tiles)
    cast_gradient(p, shared, group, block);
  else
    cast_activation(p, shared, group, block - p.gradient_tiles);
}
