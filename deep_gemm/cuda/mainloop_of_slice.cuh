// A tile's sums are those of one slice of k: all of k, or this CTA's part where a cluster splits k. (No part is without k-blocks:
// a choice of sums or zeros would take registers for both.)
#pragma once
#include "skip.cuh"
#include "slice.cuh"

// Multiplies the k-blocks of one tile.
template <uint32_t kUnits>
DEVICE void multiply_tile(const Params& p, Ring& ring, const Operands& operands, const FirstScales&, const Tile& tile,
                          RingPosition& at, float (&total)[kUnits][kUnitN / 2]) {
  const KBlocks k_blocks = k_blocks_of(p, tile);
  multiply_slice(ring, operands, k_blocks.end - k_blocks.first, at, total);
}
