// Writes a token's values and scales to its row: casts to FP8, with a scale for each 128 columns.
#pragma once
#include "cast/piece.cuh"

constexpr uint32_t kPieces = 4;  // pieces that a team loads at a time

DEVICE void put_token(const PostParams& p, uint8_t* row, uint32_t token, uint32_t blocks) {
  const uint32_t lane = ptx::thread_index() % kLanes, team = ptx::thread_index() / kLanes;
#pragma unroll 1
  for (uint32_t first = 0; first < blocks; first += kPieces * kTeams) {
    Piece pieces[kPieces];
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i)  // a team loads nothing past the last column
      pieces[i] = load_piece(p.x + uint64_t{token} * p.x_pitch, true, (first + i * kTeams + team) * kBlock, p.hidden, lane);
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) {
      if (first + i * kTeams >= blocks) break;
      const uint32_t block = first + i * kTeams + team;  // may be past the last block, because a warp stays together
      CastPiece casts[1];
      cast_pieces(&pieces[i], lane, casts);
      if (block >= blocks) continue;
      store_values(row, block * kBlock, p.hidden, lane, casts[0].values);
      if (lane == 0) ptx::st_global_f32(row + p.hidden + block * 4, casts[0].scale);
    }
  }
}
