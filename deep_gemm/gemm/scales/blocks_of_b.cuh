// B has one scale for each 128x128 block: a few numbers for a tile and k-block, in registers. The ring has A's scales.
// by_block.cuh and by_halves.cuh share this code. They define the blocks of a tile, and the columns of each block.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "scales/thread.cuh"

// The scales of B under one tile, never loaded inside the k loop. Lane l holds the scales of k-block first + l, and
// loads the scales of the k-block 32 further. A shuffle passes the current k-block's scales to all lanes.
template <uint32_t kBlocks>
struct BlockScales {
  const float* row[kBlocks];
  uint32_t stride_k, end_k_block;
  uint32_t first_column;  // the tile's first column within its first block of B, if the tile's blocks are consecutive
  float current[kBlocks], coming[kBlocks];

  DEVICE BlockScales(uint32_t stride_k_, uint32_t end_k_block_, uint32_t first_column_ = 0)
      : stride_k(stride_k_), end_k_block(end_k_block_), first_column(first_column_) {}

  DEVICE float load(uint32_t i, uint32_t first_k_block) const {
    const uint32_t k_block = first_k_block + ptx::lane_index();
    return ptx::ld_global_nc_f32(row[i] + static_cast<uint64_t>(k_block < end_k_block ? k_block : end_k_block - 1) * stride_k);
  }

  // Loads the scales of a tile's first 32 k-blocks, one k-block for each lane.
  DEVICE void ask(uint32_t first_k_block, float (&first)[kBlocks]) const {
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) first[i] = load(i, first_k_block);
  }

  DEVICE void start(const float (&first)[kBlocks]) {
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) coming[i] = first[i];
  }

  // Called before every 32nd k-block.
  DEVICE void advance(uint32_t first_k_block) {
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) {
      current[i] = coming[i];
      coming[i] = load(i, first_k_block + 32);
    }
  }

  DEVICE void of_k_block(uint32_t k_block_of_32, float (&scales)[kBlocks]) const {
#pragma unroll
    for (uint32_t i = 0; i < kBlocks; ++i) scales[i] = ptx::shfl_sync(current[i], k_block_of_32);
  }
};

// The scales of a run of kCount k-blocks, each multiplied in kPieces pieces: units, or halves of units along k.
// `kChunk` columns, beginning at a multiple of `kChunk`, are in one block of B.
template <typename TileScales, uint32_t kBlocks, uint32_t kChunk, uint32_t kCount, uint32_t kPieces, uint32_t kOfUnit>
struct RunBlockScales {
  const ThreadScales in_first_slot;
  const TileScales& of_tile;
  float sfa[kCount * kPieces][2], sfb[kCount][kBlocks];

  DEVICE RunBlockScales(const ThreadScales& in_first_slot_, const TileScales& of_tile_)
      : in_first_slot(in_first_slot_), of_tile(of_tile_) {}

  DEVICE void begin_k_block(uint32_t k_block, uint32_t k_block_of_32) { of_tile.of_k_block(k_block_of_32, sfb[k_block]); }

  // Loads the scales of all parts of a unit before its first WGMMA is issued: later loads would wait for the WGMMA.
  DEVICE void load_ahead(uint32_t stage, uint32_t k_block, uint32_t piece) {
    if (part_of_piece<kOfUnit>(piece) > 0) return;
#pragma unroll
    for (uint32_t part = 0; part < kOfUnit; ++part)
      load_scales(in_first_slot.sfa + stage * kScales + part * kScaleRows + row_of_unit(unit_of_piece<kOfUnit>(piece)),
                  sfa[k_block * kPieces + piece + part]);
  }

  DEVICE void load_behind(uint32_t, uint32_t, uint32_t) {}

  // total = fma(partial, round(sfa * sfb), total)
  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t, uint32_t k_block,
                      uint32_t piece, const Release& release_slot) const {
    const float(&rows)[2] = sfa[k_block * kPieces + piece];
    if (piece + 1 == kPieces) release_slot(rows[1]);
#pragma unroll
    for (uint32_t column = 0; column < kUnitN; column += kChunk) {
      const float scale_of_b = of_tile.at_column(sfb[k_block], column_of_unit(unit_of_piece<kOfUnit>(piece)) + column, kChunk);
      const float scale[2] = {rows[0] * scale_of_b, rows[1] * scale_of_b};
#pragma unroll
      for (uint32_t i = column / 2; i < (column + kChunk) / 2; ++i)
        total[i] = ptx::fma(partial[i], scale[i / 2 % 2], total[i]);
    }
  }
};
