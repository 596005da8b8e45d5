// Each kConvertRows rows of B in a slot have one scale. They stand behind A's, where convert/e2m1.cuh writes them.
#pragma once
#include "scales/rows_of_b.cuh"

constexpr uint32_t kFactors = ceil_div(kUnitN, kConvertRows);  // of a unit

template <uint32_t kCount, uint32_t kUnits>
struct RunScales {
  const ThreadScales in_first_slot;
  float sfa[kCount * kUnits][2];

  DEVICE RunScales(const ThreadScales& in_first_slot_, const TileScales&) : in_first_slot(in_first_slot_) {}

  DEVICE void begin_k_block(uint32_t, uint32_t) {}

  DEVICE void load_ahead(uint32_t stage, uint32_t k_block, uint32_t unit) {
    load_scales(in_first_slot.sfa + stage * kScales + row_of_unit(unit), sfa[k_block * kUnits + unit]);
  }

  DEVICE void load_behind(uint32_t, uint32_t, uint32_t) {}

  // total = fma(partial, round(sfa * sfb), total)
  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t stage, uint32_t k_block,
                      uint32_t unit, const Release& release_slot) const {
    const float(&rows)[2] = sfa[k_block * kUnits + unit];
#pragma unroll
    for (uint32_t f = 0; f < kFactors; ++f) {
      const float of_b = ptx::ld_shared_f32(in_first_slot.sfb + stage * kScales + (column_of_unit(unit) / kConvertRows + f) * 8), scale[2] = {rows[0] * of_b, rows[1] * of_b};
#pragma unroll
      for (uint32_t i = f * kConvertRows / 2; i < (f + 1) * kConvertRows / 2 && i < kUnitN / 2; ++i)
        total[i] = ptx::fma(partial[i], scale[i / 2 % 2], total[i]);
      if (unit + 1 == kUnits && f + 1 == kFactors) {
        ptx::syncwarp();
        release_slot(scale[1]);
      }
    }
  }
};
