// 128 columns of one row in FP8, cast by a team, whatever they hold.
#pragma once
#include "cast/fp8.cuh"

struct CastPiece {
  Values values;  // of a lane
  float scale;    // of all
};

// As in cast_rows, it says so if it takes a block for ordinary that is not.
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

// All lanes of a warp come here together.
DEVICE CastPiece cast_piece(const Piece& piece, uint32_t lane) {
  CastPiece cast;
  if (!cast_piece_as<true>(piece, lane, cast)) cast_piece_as<false>(piece, lane, cast);
  return cast;
}
