// Casts 128 columns of rows to FP8 by a team, whatever they hold.
#pragma once
#include "cast/fp8.cuh"

struct CastPiece {
  Values values;  // of a lane's columns
  float scale;    // of all 128 columns
};

// As in cast_rows, returns false if kIsOrdinary and a block of the warp is not ordinary.
template <bool kIsOrdinary, uint32_t kCount>
DEVICE bool cast_pieces_as(const Piece* pieces, uint32_t lane, CastPiece (&casts)[kCount]) {
  static_assert(kCount == 1 || kLanes == 32, "a team's lane for each piece");
  uint32_t keys[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) keys[i] = key_of<kIsOrdinary>(pieces[i]);
  Divisor divisor = divisor_of<kIsOrdinary>(amax_of(largest_of_team(keys, lane)), 0.f, false);
  if (kIsOrdinary && !ptx::all_sync(is_ordinary(divisor))) return false;
  const Divisor of_lane = divisor;
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    if constexpr (kCount > 1) divisor = {ptx::shfl_sync(of_lane.scale, i), ptx::shfl_sync(of_lane.reciprocal, i)};
    float quotients[kElements];
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e) quotients[e] = quotient_of<kIsOrdinary>(element_of(pieces[i], e), divisor);
    casts[i] = {pack_values(quotients), divisor.scale};
  }
  return true;
}

// Casts several pieces, because the instructions of one wait for each other. All lanes of a warp call this together.
template <uint32_t kCount>
DEVICE void cast_pieces(const Piece* pieces, uint32_t lane, CastPiece (&casts)[kCount]) {
  if (!cast_pieces_as<true>(pieces, lane, casts)) cast_pieces_as<false>(pieces, lane, casts);
}

DEVICE CastPiece cast_piece(const Piece& piece, uint32_t lane) {
  CastPiece casts[1];
  cast_pieces(&piece, lane, casts);
  return casts[0];
}
