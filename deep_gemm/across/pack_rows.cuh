// Packs tokens for collectives: casts each token to FP8 once, and writes its row for each rank that receives it.
//
//   row | FP8 values: hidden | scales: 4 ceil(hidden / 128) | ids: 4 topk | weights: 4 topk | zeros up to row_bytes |
//
// A unit is 128 columns of a token, or its routes, which count as one more block. A team of lanes has one unit.
#pragma once
#include "cast/piece.cuh"
#include "routes.cuh"

constexpr uint32_t kMaxIds = 1u << 31;  // no expert has larger ids, so their differences need not be sent

struct PackParams {
  const uint8_t* x;           // [tokens, hidden]
  const uint8_t* topk_ids;    // [tokens, topk], of kIdBytes
  const float* topk_weights;  // [tokens, topk]
  const int32_t* row_of;      // [tokens, topk]: the rows of a token, then -1; null: token i has row i
  uint8_t* rows;
  uint32_t x_pitch;           // in bytes
  uint32_t tokens;
  uint32_t slots;             // rows to write, if row_of is null; rows without a token get routes to no expert
  uint32_t hidden, topk, row_bytes;
  uint32_t unit_reciprocal;   // for dividing by a token's units: see BlockOfRows
};
#include "pack_params_layout.cuh"  // asserts the layout that core/params.py packs

// Calls `store` for each row of a token.
template <typename Store>
DEVICE void for_each_row(const PackParams& p, uint32_t token, const Store& store) {
  if (p.row_of == nullptr) return store(p.rows + uint64_t{token} * p.row_bytes);
#pragma unroll 1
  for (uint32_t j = 0; j < p.topk; ++j) {
    const int32_t row = ptx::ld_global_i32(p.row_of + uint64_t{token} * p.topk + j);
    if (row < 0) return;
    store(p.rows + static_cast<uint64_t>(row) * p.row_bytes);
  }
}

// Returns word i of a token's routes: ids, then the bits of weights, then zeros.
DEVICE uint32_t word_of_routes(const PackParams& p, uint32_t token, uint32_t i) {
  const uint64_t first_route = uint64_t{token} * p.topk;
  const bool is_there = token < p.tokens;
  if (i < p.topk) return is_there ? load_expert(p.topk_ids, first_route + i, 0, kMaxIds) : kNoExpert;
  return is_there && i < 2 * p.topk ? ptx::ld_global_b32(p.topk_weights + first_route + i - p.topk) : 0;
}

KERNEL(kNumThreads, kCtasPerSm) pack_rows(GRID_CONSTANT PackParams p) {
  const uint32_t blocks = ceil_div(p.hidden, kBlock), lane = ptx::thread_index() % kLanes;
  const BlockOfRows at(ptx::block_index() * kTeams + ptx::thread_index() / kLanes, blocks + 1, p.unit_reciprocal);
  const uint32_t token = at.row;
  const bool is_cast = token < p.tokens && at.block < blocks;
  ptx::griddepcontrol_wait();
  const Piece piece = load_piece(p.x + uint64_t{token} * p.x_pitch, is_cast, at.block * kBlock, p.hidden, lane);
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  CastPiece casts[1];
  cast_pieces(&piece, lane, casts);
  if (is_cast) {
    for_each_row(p, token, [&](uint8_t* row) {
      store_values(row, at.block * kBlock, p.hidden, lane, casts[0].values);
      if (lane == 0) ptx::st_global_f32(row + p.hidden + at.block * 4, casts[0].scale);
    });
  } else if (at.block == blocks && token < p.slots) {
    const uint32_t routes = p.hidden + blocks * 4;  // offset in a row
    for (uint32_t i = lane; i < (p.row_bytes - routes) / 4; i += kLanes) {
      const uint32_t word = word_of_routes(p, token, i);
      for_each_row(p, token, [&](uint8_t* row) { ptx::st_global_b32(row + routes + i * 4, word); });
    }
  }
}
