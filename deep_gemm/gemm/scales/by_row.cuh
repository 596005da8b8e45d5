// B has a scale for each row. Each unit loads its scales when it is promoted, because registers cannot keep so many.
#pragma once
#include "scales/rows_of_b.cuh"

template <uint32_t kCount, uint32_t kPieces, uint32_t kOfUnit>
struct RunScales : RunScalesOfRows {
  using RunScalesOfRows::RunScalesOfRows;
  float sfa[kCount * kPieces][2];

  // Loads A's and B's scales after the WGMMA is issued: loading A's before it cost time.
  DEVICE void load_behind(uint32_t stage, uint32_t k_block, uint32_t piece) {
    const uint32_t line = scale_of_part(part_of_piece<kOfUnit>(piece), kScaleParts) * kScaleRows;
    load_scales(in_first_slot.sfa + stage * kScales + line + row_of_unit(unit_of_piece<kOfUnit>(piece)),
                sfa[k_block * kPieces + piece]);
  }

  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t stage, uint32_t k_block,
                      uint32_t piece, const Release& release_slot) const {
    const uint32_t line = scale_of_part(part_of_piece<kOfUnit>(piece), kScalePartsOfB) * kBlockN;
    const float* sfb = in_first_slot.sfb + stage * kScales + line + column_of_unit(unit_of_piece<kOfUnit>(piece));
    const float last = promote_by_row(total, partial, sfa[k_block * kPieces + piece],
                                      [&](uint32_t column) { return ptx::ld_shared_v2_f32(sfb + column); });
    if (piece + 1 == kPieces) {
      ptx::syncwarp();  // all lanes have read their scales
      release_slot(last);
    }
  }
};
