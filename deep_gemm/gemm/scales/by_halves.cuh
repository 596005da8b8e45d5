// A tile's columns alternate between two matrices: kGateColumns of gate, kGateColumns of up. B has a scale for each
// 128x128 block of each matrix: first gate's, then up's. So a tile of up to 256 columns is in one block of each matrix.
#pragma once
#include "scales/blocks_of_b.cuh"

using FirstScales = float[2];

struct TileScales : BlockScales<2> {
  DEVICE TileScales(const float* sfb, uint32_t stride_n, uint32_t stride_k_, uint32_t row_n, uint32_t n,
                    uint32_t end_k_block_)
      : BlockScales(stride_k_, end_k_block_) {
    static_assert(256 % kBlockN == 0, "a tile must not reach into the next blocks");
    row[0] = sfb + static_cast<uint64_t>(row_n / 256) * stride_n;
    row[1] = row[0] + static_cast<uint64_t>(n / 256) * stride_n;
  }

  // The scale of `chunk` columns, all of gate or all of up, from `column` of the tile on.
  DEVICE float at_column(const float (&scales)[2], uint32_t column, uint32_t chunk) const { return scales[column / chunk % 2]; }
};

// A product whose k-blocks have parts has no gates (work/rows_twice.cuh): its tile is in two neighbouring blocks of B.
template <uint32_t kCount, uint32_t kPieces, uint32_t kOfUnit>
using RunScales = RunBlockScales<TileScales, 2, kOfUnit == 1 ? kGateColumns : 128, kCount, kPieces, kOfUnit>;
