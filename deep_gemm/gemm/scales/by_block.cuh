// B has one scale for each block of kScaleRowsOfB x 128, and the blocks of a tile's columns are consecutive.
#pragma once
#include "scales/blocks_of_b.cuh"

// Columns that always share one block of B. A tile begins at a multiple of kBlockN, and the second half of a cut tile
// at a multiple of kUnitN, where a unit has 128 columns.
constexpr uint32_t kScaleChunk = greatest_common_divisor(kBlockN, kScaleRowsOfB);
// The most blocks of B that a tile touches.
constexpr uint32_t kScalesPerTile =
    kBlockN % kScaleRowsOfB == 0 ? kBlockN / kScaleRowsOfB : ceil_div(kScaleRowsOfB - kScaleChunk + kBlockN, kScaleRowsOfB);

using FirstScales = float[kScalesPerTile];

struct TileScales : BlockScales<kScalesPerTile> {
  DEVICE TileScales(const float* sfb, uint32_t stride_n, uint32_t stride_k_, uint32_t row_n, uint32_t n,
                    uint32_t end_k_block_)
      : BlockScales(stride_k_, end_k_block_, row_n % kScaleRowsOfB) {
    const uint32_t last_block = (n - 1) / kScaleRowsOfB;
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerTile; ++i) {
      // Columns of a tile past n, and a cluster's tile outside D, use the last scale: no address is outside sfb.
      const uint32_t block = row_n / kScaleRowsOfB + i < last_block ? row_n / kScaleRowsOfB + i : last_block;
      row[i] = sfb + static_cast<uint64_t>(block) * stride_n;
    }
  }

  // The scale of the chunk of columns that begins at `column` of the tile.
  DEVICE float at_column(const float (&scales)[kScalesPerTile], uint32_t column, uint32_t) const {
    if constexpr (kBlockN % kScaleRowsOfB == 0) return scales[column / kScaleRowsOfB];
    float scale = scales[0];
#pragma unroll
    for (uint32_t i = 1; i < kScalesPerTile; ++i) scale = first_column + column >= i * kScaleRowsOfB ? scales[i] : scale;
    return scale;
  }
};

template <uint32_t kCount, uint32_t kPieces, uint32_t kOfUnit>
using RunScales =
    RunBlockScales<TileScales, kScalesPerTile, kScaleChunk < kUnitN ? kScaleChunk : kUnitN, kCount, kPieces, kOfUnit>;
