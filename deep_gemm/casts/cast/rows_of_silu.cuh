// For products of BF16, computes rows of two results in BF16: the gradient of gate and up, and s = silu(gate) * up
// times the row's weight. It also sums s * ds for each row and tile; these sums are the weight's gradient.
#pragma once
#include "cast/silu_gradient.cuh"

struct Storage {
  alignas(16) uint32_t nothing[4];
};
constexpr uint32_t kRowsAtOnce = 2;  // rows that a thread loads and computes at a time
static_assert(kTeamRows % kRowsAtOnce == 0);

DEVICE void store_piece(uint8_t* to, const Piece& piece) {
  ptx::st_global_v4_b32(to, piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
}

DEVICE void cast_tile_of(const DepthsCastParams& p, Storage&, const Group& group, uint32_t block) {
  const Tile tile = tile_of(group, block * kBlock);
  const uint32_t half = p.k / 2, first_byte = (tile.column + column_of(tile.lane, 0)) * kInputBytes;
#pragma unroll 1
  for (uint32_t first = 0; first < kTeamRows; first += kRowsAtOnce) {
    Piece gate[kRowsAtOnce], up[kRowsAtOnce], ds[kRowsAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
      const uint32_t row = tile.row + tile.row_of(first + i);
      const uint8_t* at = p.x + uint64_t{group.first_row + row} * p.x_pitch;
      gate[i] = load_piece(at, row < group.rows, tile.column, half, tile.lane);
      up[i] = load_piece(at + half * kInputBytes, row < group.rows, tile.column, half, tile.lane);
      ds[i] = load_piece(p.ds + uint64_t{group.first_row + row} * p.ds_pitch, row < group.rows, tile.column, half, tile.lane);
    }
#pragma unroll
    for (uint32_t i = 0; i < kRowsAtOnce; ++i) {
      const uint32_t row = tile.row + tile.row_of(first + i);
      float sum = compute_row<true>(p.limit, weight_of(p, group, row), gate[i], up[i], ds[i]);
#pragma unroll
      for (uint32_t distance = 1; distance < kLanes; distance *= 2) sum += ptx::shfl_sync(sum, ptx::lane_index() ^ distance);
      if (row >= group.rows) continue;
      const uint64_t at = group.first_row + row;
      if (p.sums != nullptr && tile.lane == 0) ptx::st_global_f32(p.sums + uint64_t{block} * p.rows + at, sum);
      if (first_byte >= half * kInputBytes) continue;
      uint8_t* gradient = p.values + at * p.k * kInputBytes + first_byte;
      if (p.values != nullptr) store_piece(gradient, gate[i]), store_piece(gradient + half * kInputBytes, up[i]);
      if (p.activated != nullptr) store_piece(p.activated + at * half * kInputBytes + first_byte, ds[i]);
    }
  }
}
