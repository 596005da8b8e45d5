// 64 rows of B in a slot have one scale. convert/e2m1.cuh writes these scales after A's, and they are loaded together
// with A's: loading them after the WGMMAs are issued took 6% of a product's time.
#pragma once
#include "scales/rows_of_b.cuh"

static_assert(kUnitN == 64 || kUnitN == 128, "one factor of a unit, or both");

template <uint32_t kCount, uint32_t kUnits, uint32_t>
struct RunScales : RunScalesOfRows {
  using RunScalesOfRows::RunScalesOfRows;
  float sfa[kCount * kUnits][2];
  ptx::Float2 factors[kCount];

  DEVICE void load_ahead(uint32_t stage, uint32_t k_block, uint32_t unit) {
    if (unit == 0) factors[k_block] = ptx::ld_shared_v2_f32(in_first_slot.sfb + stage * kScales);
    load_scales(in_first_slot.sfa + stage * kScales + row_of_unit(unit), sfa[k_block * kUnits + unit]);
  }

  // total = fma(partial, round(sfa * sfb), total)
  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t, uint32_t k_block,
                      uint32_t unit, const Release& release_slot) const {
    const float(&rows)[2] = sfa[k_block * kUnits + unit];
    if (unit + 1 == kUnits) release_slot(rows[1]);
#pragma unroll
    for (uint32_t column = 0; column < kUnitN; column += 64) {
      const float factor = column_of_unit(unit) + column == 0 ? factors[k_block].x : factors[k_block].y;
      const float scale[2] = {rows[0] * factor, rows[1] * factor};
#pragma unroll
      for (uint32_t i = column / 2; i < column / 2 + 32; ++i) total[i] = ptx::fma(partial[i], scale[i / 2 % 2], total[i]);
    }
  }
};
