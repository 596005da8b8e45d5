// The casts of columns_of_silu.cuh, if gate and up each have a multiple of 128 columns. A CTA loads 128 columns of
// gate, of up and of ds once, and casts three tiles: two of the gradient, and one of the activation.
//
// A thread's pieces are in shared memory, since registers cannot hold them. The numbers to cast replace the pieces.
#pragma once
#include "cast/silu_gradient.cuh"

enum : uint32_t { kGate, kUp, kDs, kPieces };
constexpr uint32_t kRowsAtOnce = 2;  // rows that a thread computes at a time: registers hold no more
static_assert(kTeamRows % kRowsAtOnce == 0);

struct Storage {
  // A thread uses only its own pieces until all of them are in registers. Then the cast of the tile reuses this memory.
  union alignas(16) Slot {
    uint8_t pieces[kTeamRows][kNumThreads][16];
    TileStorage tile;
  } slots[kPieces];
};

DEVICE void* slot_of(Storage& shared, uint32_t which, uint32_t i) { return shared.slots[which].pieces[i][ptx::thread_index()]; }

DEVICE Piece load_slot(Storage& shared, uint32_t which, uint32_t i) {
  const ptx::Uint4 v = ptx::ld_shared_v4_b32(slot_of(shared, which, i));
  return {v.x, v.y, v.z, v.w};
}

DEVICE void store_slot(Storage& shared, uint32_t which, uint32_t i, const Piece& piece) {
  ptx::st_shared_v4_b32(slot_of(shared, which, i), piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
}

DEVICE void load_pieces(const DepthsCastParams& p, Storage& shared, const Group& group, const Tile& tile) {
  const uint32_t first_byte = (tile.column + column_of(tile.lane, 0)) * kInputBytes, up = p.k / 2 * kInputBytes;
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) {
    const uint32_t row = tile.row + tile.row_of(i);
    const uint8_t* gate = p.x + uint64_t{group.first_row + row} * p.x_pitch + first_byte;
    const uint8_t* ds = p.ds + uint64_t{group.first_row + row} * p.ds_pitch + first_byte;
    if (row < group.rows) {
      ptx::cp_async_16(slot_of(shared, kGate, i), gate);
      ptx::cp_async_16(slot_of(shared, kUp, i), gate + up);
      ptx::cp_async_16(slot_of(shared, kDs, i), ds);
    } else {
#pragma unroll
      for (uint32_t which = 0; which < kPieces; ++which) store_slot(shared, which, i, {});
    }
  }
}

DEVICE void compute_pieces(const DepthsCastParams& p, Storage& shared, const Group& group, const Tile& tile, uint32_t block) {
  const float weight_of_lane = weight_of(p, group, tile.row + tile.row_of(tile.lane % kTeamRows));
  float* sums = p.sums + uint64_t{block} * p.rows + group.first_row;
  ptx::cp_async_wait_all();
#pragma unroll 1
  for (uint32_t first = 0; first < kTeamRows; first += kRowsAtOnce) {
#pragma unroll
    for (uint32_t i = first; i < first + kRowsAtOnce; ++i) {
      const uint32_t row = tile.row + tile.row_of(i);
      const float weight = ptx::shfl_sync(weight_of_lane, ptx::lane_index() - tile.lane + i);
      Piece gate = load_slot(shared, kGate, i), up = load_slot(shared, kUp, i), ds = load_slot(shared, kDs, i);
      float sum = compute_row<false>(p.limit, weight, gate, up, ds);
      store_slot(shared, kGate, i, gate), store_slot(shared, kUp, i, up), store_slot(shared, kDs, i, ds);
      if (p.activated == nullptr) continue;
#pragma unroll
      for (uint32_t distance = 1; distance < kLanes; distance *= 2) sum += ptx::shfl_sync(sum, ptx::lane_index() ^ distance);
      if (tile.lane == 0 && row < group.rows) ptx::st_global_f32(sums + row, sum);
    }
  }
}

// Loads the numbers to cast from slot `which` into registers, as a tile.
DEVICE Tile& take_tile(Storage& shared, Tile& tile, uint32_t which, uint32_t column) {
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) tile.pieces[i] = load_slot(shared, which, i);
  tile.column = column;
  ptx::syncthreads();  // all threads have read their pieces: the cast reuses this memory
  return tile;
}

DEVICE void cast_tile_of(const DepthsCastParams& p, Storage& shared, const Group& group, uint32_t block) {
  Tile tile = tile_of(group, block * kBlock);
  const uint32_t half = p.k / 2, column = tile.column;
  load_pieces(p, shared, group, tile);
  compute_pieces(p, shared, group, tile, block);
  if (p.activated != nullptr) {
    const TileCastParams target = target_of(group, p.activated, p.activated_scales, p.activated_stride_of_block, half);
    cast_any_tile<false>(shared.slots[kDs].tile, target, take_tile(shared, tile, kDs, column));
  }
  if (p.columns == nullptr) return;
  const TileCastParams target = gradient_target_of(p, group);
#pragma unroll 1
  for (uint32_t which = kGate; which <= kUp; ++which)
    cast_any_tile(shared.slots[which].tile, target, take_tile(shared, tile, which, column + (which == kUp ? half : 0)));
}
