// Sums a tile's products over one slice of k: all of k, or this CTA's part if a cluster splits k.
#pragma once
#include "slice.cuh"
#include CONVERT
#include EPILOGUE

// Multiplies the k-blocks of one tile.
template <uint32_t kUnits>
DEVICE void multiply_tile(const Params& p, Ring& ring, const Operands& operands, const FirstScales&, const Tile& tile,
                          RingPosition& at, Passes&, const Share&, Output&, float (&total)[kUnits][kUnitN / 2]) {
  const KBlocks k_blocks = k_blocks_of(p, tile);
  // Sums of no k-blocks, which only groups along k may have, must be zeros. And if C was added to the last tile's sums,
  // or they were activated, they must be cleared: otherwise ptxas takes the old sums for an input of this tile's
  // products, and makes these products wait for each other (note C7515).
  if constexpr (kWithC || kMayBeEmpty || kColumnsOfValue > 1) {
#pragma unroll
    for (auto& unit : total)
#pragma unroll
      for (float& x : unit) x = 0;
  }
  multiply_slice(ring, operands, k_blocks.end - k_blocks.first, at, total);
}
