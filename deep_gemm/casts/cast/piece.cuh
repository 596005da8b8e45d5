// A team casts 128 columns of one row to FP8. The result is right for any numbers.
#pragma once
#include "cast/fp8.cuh"

struct CastPiece {
  Values values;  // the values of a lane's columns
  float scale;    // the scale of all 128 columns
};

// Returns false, as in cast_rows, if kIsOrdinary and a block of the warp is not ordinary.
template <bool kIsOrdinary>
DEVICE CastPiece cast_by(const Divisor& divisor, const Piece& piece) {
  float quotients[kElements];
#pragma unroll
  for (uint32_t e = 0; e < kElements; ++e) quotients[e] = quotient_of<kIsOrdinary>(element_of(piece, e), divisor);
  return {pack_values(quotients), divisor.scale};
}

// Casts several pieces at a time, as a piece's instructions wait for each other. All lanes of a warp call it together.
template <uint32_t kCount, bool kIsOrdinary = true>
DEVICE void cast_pieces(const Piece* pieces, uint32_t lane, CastPiece (&casts)[kCount]) {
  static_assert(kCount == 1 || kLanes == 32, "a team's lane for each piece");
  uint32_t keys[kCount];
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) keys[i] = key_of<kIsOrdinary>(pieces[i]);
  const Divisor of_lane = divisor_of<kIsOrdinary>(amax_of(largest_of_team(keys, lane)), 0.f, false);
  if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return cast_pieces<kCount, false>(pieces, lane, casts);
#pragma unroll
  for (uint32_t i = 0; i < kCount; ++i) {
    Divisor divisor = of_lane;
    if constexpr (kCount > 1) divisor = {ptx::shfl_sync(of_lane.scale, i), ptx::shfl_sync(of_lane.reciprocal, i)};
    casts[i] = cast_by<kIsOrdinary>(divisor, pieces[i]);
  }
}
