// B has a scale for each row. A warpgroup's units, one below another, load these scales once for each k-block.
#pragma once
#include "scales/rows_of_b.cuh"

template <uint32_t kCount, uint32_t kUnits, uint32_t>
struct RunScales : RunScalesOfRows {
  using RunScalesOfRows::RunScalesOfRows;
  float sfa[kCount * kUnits][2];
  ptx::Float2 sfb[kCount][kUnitN / 8];

  // Called before the first unit's WGMMA is issued: loads B's scales, and A's for all units.
  DEVICE void load_ahead(uint32_t stage, uint32_t k_block, uint32_t unit) {
    if (unit > 0) return;
    const auto of_slot = [&](const float* scales, uint32_t index) {
      if constexpr (kLoadsScalesByAddress)
        return ptx::smem_address(scales) + (stage * kScales + index) * 4;
      else
        return scales + stage * kScales + index;
    };
#pragma unroll
    for (uint32_t column = 0; column < kUnitN; column += 8)
      sfb[k_block][column / 8] = ptx::ld_shared_v2_f32(of_slot(in_first_slot.sfb, column));
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) load_scales(of_slot(in_first_slot.sfa, row_of_unit(u)), sfa[k_block * kUnits + u]);
  }

  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t, uint32_t k_block,
                      uint32_t unit, const Release& release_slot) const {
    const float(&rows)[2] = sfa[k_block * kUnits + unit];
    if (unit + 1 == kUnits) release_slot(rows[1]);
    promote_by_row(total, partial, rows, [&](uint32_t column) { return sfb[k_block][column / 8]; });
  }
};
