// A token's values and scales in its row: cast to FP8 here, with a scale for each 128 columns.
#pragma once
#include "cast/piece.cuh"

DEVICE void store_piece(const SendParams& p, uint8_t* row, uint32_t block, uint32_t lane, const CastPiece& cast) {
  const uint32_t column = block * kBlock + column_of(lane, 0);
  if (column >= p.hidden) return;
  if constexpr (kVector == 8)
    ptx::st_shared_v2_b32(row + column, cast.values.words[0], cast.values.words[1]);
  else
    ptx::st_shared_b32(row + column, cast.values.words[0]);
  if (lane == 0) ptx::st_shared_f32(row + p.hidden + block * 4, cast.scale);
}

DEVICE void put_token(const SendParams& p, uint8_t* row, uint32_t token, uint32_t blocks) {
  const uint32_t lane = ptx::thread_index() % kLanes;
#pragma unroll 1
  for (uint32_t first = 0; first < blocks; first += kTeams) {
    const uint32_t block = first + ptx::thread_index() / kLanes;  // past the last for some teams: a warp stays together
    const Piece piece = load_piece(p.x + uint64_t{token} * p.x_pitch, true, block * kBlock, p.hidden, lane);
    store_piece(p, row, block, lane, cast_piece(piece, lane));
  }
}
