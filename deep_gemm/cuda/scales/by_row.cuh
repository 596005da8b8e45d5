// B has a scale for each row, and each unit loads them for itself while it is promoted: too many to be kept in registers.
#pragma once
#include "scales/rows_of_b.cuh"

using Sfb = float[1];  // nothing is held

DEVICE void begin_k_block(const TileScales&, uint32_t, Sfb&) {}

template <uint32_t kUnits, uint32_t kPieces>
DEVICE void load_ahead(const ThreadScales&, const RingPosition&, uint32_t, const float*, Sfb&, float (&)[kPieces][2], uint32_t) {}

// B's come behind the WGMMA, and A's with them: A's alone ahead of it cost time.
DEVICE void load_behind(const float* sfa_of_unit, float (&sfa)[2]) { load_scales(sfa_of_unit, sfa); }

template <typename Release>
DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], const float (&sfa)[2], const Sfb&,
                    const TileScales&, const ThreadScales& from, uint32_t stage, uint32_t unit, bool is_last,
                    const Release& release_slot) {
  const float* scales = from.sfb + stage * kScales + column_of_unit(unit);
  const float last =
      promote_by_row(total, partial, sfa, [&](uint32_t pair) { return ptx::ld_shared_v2_f32(scales + pair); });
  if (is_last) {
    ptx::syncwarp();  // all lanes have read their scales
    release_slot(last);
  }
}
