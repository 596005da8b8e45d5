// Casts 128 columns of one row to FP8 by a team, for any numbers.
#pragma once
#include "cast/fp8.cuh"

struct CastPiece {
  Values values;  // the values of a lane's columns
  float scale;    // the scale of all 128 columns
};

// Returns false, as in cast_rows, if kIsOrdinary and a block of the warp is not ordinary.
template <bool kIsOrdinary>
DEVICE bool cast_piece_as(const Piece& piece, uint32_t lane, CastPiece& cast) {
  uint32_t keys[1] = {key_of<kIsOrdinary>(piece)};
  const Divisor divisor = divisor_of<kIsOrdinary>(amax_of(largest_of_team(keys, lane)), 0.f, false);
  if (kIsOrdinary && !ptx::all_sync(is_ordinary(divisor))) return false;
  float quotients[kElements];
#pragma unroll
  for (uint32_t e = 0; e < kElements; ++e) quotients[e] = quotient_of<kIsOrdinary>(element_of(piece, e), divisor);
  cast = {pack_values(quotients), divisor.scale};
  return true;
}

// All lanes of a warp call this together.
DEVICE CastPiece cast_piece(const Piece& piece, uint32_t lane) {
  CastPiece cast;
  if (!cast_piece_as<true>(piece, lane, cast)) cast_piece_as<false>(piece, lane, cast);
  return cast;
}
