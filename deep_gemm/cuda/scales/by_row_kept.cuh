// B has a scale for each row, and a warpgroup's units, which lie below each other, share what is loaded once for a k-block.
#pragma once
#include "scales/rows_of_b.cuh"

using Sfb = ptx::Float2[kUnitN / 8];

DEVICE void begin_k_block(const TileScales&, uint32_t, Sfb&) {}

// Before the first unit's WGMMA: B's, and A's of all units.
template <uint32_t kUnits, uint32_t kPieces>
DEVICE void load_ahead(const ThreadScales& from, const RingPosition& at, uint32_t unit, const float*, Sfb& sfb,
                       float (&sfa)[kPieces][2], uint32_t piece) {
  if (unit > 0) return;
  const auto of_slot = [&](const float* scales, uint32_t index) {
    if constexpr (kLoadsScalesByAddress)
      return ptx::smem_address(scales) + (at.stage * kScales + index) * 4;
    else
      return scales + at.stage * kScales + index;
  };
#pragma unroll
  for (uint32_t pair = 0; pair < kUnitN; pair += 8) sfb[pair / 8] = ptx::ld_shared_v2_f32(of_slot(from.sfb, pair));
#pragma unroll
  for (uint32_t u = 0; u < kUnits; ++u) load_scales(of_slot(from.sfa, row_of_unit(u)), sfa[piece + u]);
}

DEVICE void load_behind(const float*, float (&)[2]) {}

template <typename Release>
DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], const float (&sfa)[2], const Sfb& sfb,
                    const TileScales&, const ThreadScales&, uint32_t, uint32_t, bool is_last, const Release& release_slot) {
  if (is_last) release_slot(sfa[1]);
  promote_by_row(total, partial, sfa, [&](uint32_t pair) { return sfb[pair / 8]; });
}
