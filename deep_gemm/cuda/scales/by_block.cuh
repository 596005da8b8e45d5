// B has one scale for each 128x128 block: a few numbers for a tile and k-block, kept in registers. A's come through the ring.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "scales/thread.cuh"

// Columns that certainly share one 128x128 block of B, wherever a tile begins: at a multiple of kBlockN, or, the second half of
// one that is cut, of kUnitN, where a unit is 128 columns.
constexpr uint32_t kScaleChunk = greatest_common_divisor(kBlockN, 128);
// How many blocks of B a tile touches at most.
constexpr uint32_t kScalesPerTile =
    kBlockN % 128 == 0 ? kBlockN / 128 : ceil_div(128 - kScaleChunk + kBlockN, 128);

// Those of a tile's first k-blocks: each lane's of a block of B.
using FirstScales = float[kScalesPerTile];

// The scales of B under one tile, never loaded inside the k loop: lane l holds those of k-block first + l, the next 32
// k-blocks are on their way meanwhile, and a shuffle hands the current one to all lanes.
struct TileScales {
  const float* row[kScalesPerTile];
  uint32_t stride_k, end_k_block;
  uint32_t first_column;  // of the tile, within its first block of B
  float current[kScalesPerTile], coming[kScalesPerTile];

  DEVICE TileScales(const float* sfb, uint32_t stride_n, uint32_t stride_k_, uint32_t row_n, uint32_t n,
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

  DEVICE void ask(uint32_t first_k_block, FirstScales& first) const {
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerTile; ++i) first[i] = load(i, first_k_block);
  }

  DEVICE void start(const FirstScales& first) {
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerTile; ++i) coming[i] = first[i];
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

// The scales of kCount k-blocks in a line, each multiplied in kUnits units.
template <uint32_t kCount, uint32_t kUnits>
struct RunScales {
  const ThreadScales in_first_slot;
  const TileScales& of_tile;
  float sfa[kCount * kUnits][2], sfb[kCount][kScalesPerTile];

  DEVICE RunScales(const ThreadScales& in_first_slot_, const TileScales& of_tile_)
      : in_first_slot(in_first_slot_), of_tile(of_tile_) {}

  DEVICE void begin_k_block(uint32_t k_block, uint32_t k_block_of_32) { of_tile.of_k_block(k_block_of_32, sfb[k_block]); }

  DEVICE void load_ahead(uint32_t stage, uint32_t k_block, uint32_t unit) {
    load_scales(in_first_slot.sfa + stage * kScales + row_of_unit(unit), sfa[k_block * kUnits + unit]);
  }

  DEVICE void load_behind(uint32_t, uint32_t, uint32_t) {}

  // total = fma(partial, round(sfa * sfb), total)
  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t, uint32_t k_block,
                      uint32_t unit, const Release& release_slot) const {
    const float(&rows)[2] = sfa[k_block * kUnits + unit];
    if (unit + 1 == kUnits) release_slot(rows[1]);
    constexpr uint32_t kChunk = kScaleChunk < kUnitN ? kScaleChunk : kUnitN;
#pragma unroll
    for (uint32_t column = 0; column < kUnitN; column += kChunk) {
      const float scale_of_b = of_tile.at_column(sfb[k_block], column_of_unit(unit) + column);
      const float scale[2] = {rows[0] * scale_of_b, rows[1] * scale_of_b};
#pragma unroll
      for (uint32_t i = column / 2; i < (column + kChunk) / 2; ++i)
        total[i] = ptx::fma(partial[i], scale[i / 2 % 2], total[i]);
    }
  }
};
