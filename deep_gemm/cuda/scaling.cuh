// Scales, and the promotion of a k-block's partial sums into the FP32 accumulators.
//
// A thread of a math warpgroup holds of each 64 x n unit: rows lane / 4 and lane / 4 + 8 of its warp's 16, and of each
// 8 columns the two from lane % 4 * 2 on. Accumulator 4 * g + i is row i / 2, column 8 * g + i % 2 of these.
// (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32".)
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

// Columns that certainly share one 128x128 block of B, wherever a tile begins: at a multiple of kBlockN, or, the second half of
// one that is cut, of kUnitN, where a unit is 128 columns.
constexpr uint32_t kScaleChunk = greatest_common_divisor(kBlockN, 128);
// How many blocks of B a tile touches at most.
constexpr uint32_t kScalesPerTile =
    kBlockN % 128 == 0 ? kBlockN / 128 : ceil_div(128 - kScaleChunk + kBlockN, 128);

// The scales of B under one tile, never loaded inside the k loop: lane l holds those of k-block first + l, the next 32
// k-blocks are on their way meanwhile, and a shuffle hands the current one to all lanes.
struct BlockScales {
  const float* row[kScalesPerTile];
  uint32_t stride_k, end_k_block;
  uint32_t first_column;  // of the tile, within its first block of B
  float current[kScalesPerTile], coming[kScalesPerTile];

  DEVICE BlockScales(const float* sfb, uint32_t stride_n, uint32_t stride_k_, uint32_t row_n, uint32_t n,
                     uint32_t end_k_block_)
      : stride_k(stride_k_), end_k_block(end_k_block_), first_column(row_n % 128) {
    const uint32_t last_block = (n - 1) / 128;
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerTile; ++i) {
      // A tile's columns past n, and a cluster's tile outside D, take the last scale: never an address outside sfb.
      const uint32_t block = row_n / 128 + i < last_block ? row_n / 128 + i : last_block;
      row[i] = sfb + static_cast<uint64_t>(block) * stride_n;
    }
  }

  DEVICE float load(uint32_t i, uint32_t first_k_block) const {
    const uint32_t k_block = first_k_block + ptx::lane_index();
    return ptx::ld_global_nc_f32(row[i] + static_cast<uint64_t>(k_block < end_k_block ? k_block : end_k_block - 1) * stride_k);
  }

  // To be called before every 32nd k-block.
  DEVICE void advance(uint32_t first_k_block) {
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerTile; ++i) {
      current[i] = coming[i];
      coming[i] = load(i, first_k_block + 32);
    }
  }

  DEVICE void of_k_block(uint32_t k_block_of_32, float (&scales)[kScalesPerTile]) const {
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerTile; ++i) scales[i] = ptx::shfl_sync(current[i], k_block_of_32);
  }

  // The scale of the chunk of columns that begins at `column` of the tile.
  DEVICE float at_column(const float (&scales)[kScalesPerTile], uint32_t column) const {
    if constexpr (kBlockN % 128 == 0) return scales[column / 128];
    float scale = scales[0];
#pragma unroll
    for (uint32_t i = 1; i < kScalesPerTile; ++i) scale = first_column + column >= i * 128 ? scales[i] : scale;
    return scale;
  }
};

// The scales of the thread's two rows of a unit of A, by a pointer to them or by their address.
DEVICE void load_scales(const float* sfa, float (&scales)[2]) {
  scales[0] = ptx::ld_shared_f32(sfa);
  scales[1] = ptx::ld_shared_f32(sfa + 8);
}
DEVICE void load_scales(uint32_t sfa, float (&scales)[2]) {
  scales[0] = ptx::ld_shared_f32(sfa);
  scales[1] = ptx::ld_shared_f32(sfa + 8 * 4);
}

// Where each row of B has its scale, loading them takes a tenth of the product's time. With kKeepsRowScales the units of rows
// of a warpgroup share what is loaded once, ahead; else there are too many for that.
constexpr bool kLoadsRowScalesLate = kSfbIsPerRow && !kKeepsRowScales;

// total = fma(partial, round(sfa * sfb), total), for one 64 x kUnitN unit whose columns begin at `unit_column`.
DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], const float (&sfa)[2],
                    const BlockScales& block_scales, const float (&sfb)[kScalesPerTile], uint32_t unit_column) {
  constexpr uint32_t kChunk = kScaleChunk < kUnitN ? kScaleChunk : kUnitN;
#pragma unroll
  for (uint32_t column = 0; column < kUnitN; column += kChunk) {
    const float scale_of_b = block_scales.at_column(sfb, unit_column + column);
    const float scale[2] = {sfa[0] * scale_of_b, sfa[1] * scale_of_b};
#pragma unroll
    for (uint32_t i = column / 2; i < (column + kChunk) / 2; ++i)
      total[i] = ptx::fma(partial[i], scale[i / 2 % 2], total[i]);
  }
}

// The same where each row of B, a column of D, has its scale: `scales_of_columns` gives those of the thread's two columns in
// the 8 from a column on. Where it loads them the slot may be given back once the value returned is there, the last of them.
template <typename Scales>
DEVICE float promote_by_row(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], const float (&sfa)[2],
                            const Scales& scales_of_columns) {
  float last = 0;
#pragma unroll
  for (uint32_t column = 0; column < kUnitN; column += 8) {
    const ptx::Float2 scale = scales_of_columns(column);
    const uint32_t i = column / 2;
    total[i] = ptx::fma(partial[i], sfa[0] * scale.x, total[i]);
    total[i + 1] = ptx::fma(partial[i + 1], sfa[0] * scale.y, total[i + 1]);
    total[i + 2] = ptx::fma(partial[i + 2], sfa[1] * scale.x, total[i + 2]);
    total[i + 3] = ptx::fma(partial[i + 3], sfa[1] * scale.y, total[i + 3]);
    last = scale.y;
  }
  return last;
}
