// Each scale of B covers a block smaller than 128 x 128. convert/scales_of_blocks.cuh writes a k-block's scales into
// the slot, after A's, by parts of the k-block and chunks of columns. If each chunk of a k-block has one scale for all
// its parts, the k-block is promoted at once, else in parts. So the choice depends only on the block's own scales, as
// long as all tiles have the same columns.
#pragma once
#include "scales/rows_of_b.cuh"

template <uint32_t kCount, uint32_t kPieces, uint32_t kOfUnit>
struct RunScales : RunScalesOfRows {
  using RunScalesOfRows::RunScalesOfRows;
  static constexpr uint32_t kChunks = kBlockN / kScaleRowsOfB;
  static_assert(kUnitN == kBlockN, "a unit has all chunks");
  float sfa[kCount * kPieces][2];
  float sfb[kCount * kPieces][kChunks];

  // Whether all parts of a slot are promoted at once.
  static DEVICE bool parts_fold(const ThreadScales& in_first_slot, uint32_t stage) {
    return ptx::all_sync(ptx::ld_shared_b32(in_first_slot.sfb + stage * kScales + kScalesWritten - 1) != 0);
  }

  // Called before the piece's WGMMA is issued: loads A's scales, then B's.
  DEVICE void load_ahead(uint32_t stage, uint32_t k_block, uint32_t piece) {
    const uint32_t part = part_of_piece<kOfUnit>(piece), unit = unit_of_piece<kOfUnit>(piece);
    float(&rows)[2] = sfa[k_block * kPieces + piece];
    float(&chunks)[kChunks] = sfb[k_block * kPieces + piece];
    load_scales(in_first_slot.sfa + stage * kScales + scale_of_part(part, kScaleParts) * kScaleRows + row_of_unit(unit), rows);
    const float* const of_part = in_first_slot.sfb + stage * kScales + scale_of_part(part, kScalePartsOfB) * kChunks;
    if constexpr (kChunks == 4) {
      const ptx::Float4 four = ptx::ld_shared_v4_f32(of_part);
      chunks[0] = four.x, chunks[1] = four.y, chunks[2] = four.z, chunks[3] = four.w;
    } else {
      const ptx::Float2 two = ptx::ld_shared_v2_f32(of_part);
      chunks[0] = two.x, chunks[1] = two.y;
    }
  }

  // total = fma(partial, round(sfa * sfb), total)
  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t, uint32_t k_block,
                      uint32_t piece, const Release& release_slot) const {
    const float(&rows)[2] = sfa[k_block * kPieces + piece];
    const float(&chunks)[kChunks] = sfb[k_block * kPieces + piece];
    if (piece + 1 == kPieces) release_slot(chunks[kChunks - 1]);
#pragma unroll
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const float scale[2] = {rows[0] * chunks[chunk], rows[1] * chunks[chunk]};
      constexpr uint32_t kValues = kScaleRowsOfB / 2;
#pragma unroll
      for (uint32_t i = chunk * kValues; i < (chunk + 1) * kValues; ++i)
        total[i] = ptx::fma(partial[i], scale[i / 2 % 2], total[i]);
    }
  }
};
