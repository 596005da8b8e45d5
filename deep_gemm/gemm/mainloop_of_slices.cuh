// A tile's sums are those of kSlices slices of k, each summed from zero, added up in order: the bits that CTAs of a cluster give
// which take a slice each (epilogue/split.cuh).
#pragma once
#include "ptx/memory.cuh"
#include "skip.cuh"
#include "slice.cuh"

// Multiplies the k-blocks of one tile.
template <uint32_t kUnits>
DEVICE void multiply_tile(const Params& p, Ring& ring, const Operands& operands, const FirstScales&, const Tile& tile,
                          RingPosition& at, Passes&, const Share&, float (&total)[kUnits][kUnitN / 2]) {
  const uint32_t k_blocks = k_blocks_of(p, tile).end;
#pragma unroll
  for (auto& unit : total)
#pragma unroll
    for (float& x : unit) x = -0.0f;  // to which any first sum may be added without changing its bits
#pragma unroll 1
  for (uint32_t slice = 0; slice < kSlices; ++slice) {
    float sum[kUnits][kUnitN / 2];
    const uint32_t first = k_blocks * slice / kSlices, end = k_blocks * (slice + 1) / kSlices;
    multiply_slice(ring, operands, end - first, at, sum);
    if (first == end) continue;
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (uint32_t i = 0; i < kUnitN / 2; ++i) total[unit][i] = ptx::add_rn(total[unit][i], sum[unit][i]);
  }
}
