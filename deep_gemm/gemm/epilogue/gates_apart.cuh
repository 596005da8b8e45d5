// Finds gate and up of columns under a scale, if B has all rows of gate first: 128 columns, gate in one unit and up in
// the next (rows of B: work/rows_of_layer_params.cuh). Both are rounded to BF16, as in a BF16 product.
#pragma once
#include "cast/silu.cuh"
#include "config.cuh"

constexpr uint32_t kColumns = 128;  // columns of activations under one scale
constexpr uint32_t kUnitsOfScale = 2;
static_assert(kUnitN == kColumns && kUnitsAlongN == kUnitsOfScale, "a tile has gate and up of what lies under one scale");

// A thread's activations in one row: columns 8 * j + lane % 4 * 2 and the next column, for each j.
using Activated = float[kColumns / 4];

// `half` selects one of the thread's two rows.
template <uint32_t kUnits>
DEVICE void activate(const float (&totals)[kUnits][kUnitN / 2], uint32_t unit, uint32_t half, float limit, float weight,
                     Activated& activated) {
#pragma unroll
  for (uint32_t i = 0; i < kColumns / 4; i += 2) {
    const uint32_t at = i * 2 + half * 2;
    const ptx::Float2 gates = ptx::unpack_bf16(ptx::pack_bf16(totals[unit][at], totals[unit][at + 1]));
    const ptx::Float2 ups = ptx::unpack_bf16(ptx::pack_bf16(totals[unit + 1][at], totals[unit + 1][at + 1]));
    const float gate[2] = {gates.x, gates.y}, up[2] = {ups.x, ups.y};
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const float product = ptx::mul_rn(silu(ptx::min_nan(gate[j], limit)), ptx::min_magnitude(up[j], limit));
      activated[i + j] = ptx::mul_rn(product, weight);
    }
  }
}
