// Gate and up of the columns under one scale, if B has 8 rows of gate and 8 of up in turn: 64 columns, in one unit. A
// thread has two gates and their two ups of each 16 columns of the product, in each of its two rows.
#pragma once
#include "cast/silu.cuh"
#include "config.cuh"

constexpr uint32_t kColumns = 64;  // columns of activations under one scale
constexpr uint32_t kUnitsOfScale = 1;
static_assert(kUnitN == 2 * kColumns, "a unit is what lies under one scale");

// A thread's activations in one row: columns 8 * j + lane % 4 * 2 and the next column, for each j.
using Activated = float[kColumns / 4];

// `half` selects one of the thread's two rows.
template <uint32_t kUnits>
DEVICE void activate(const float (&totals)[kUnits][kUnitN / 2], uint32_t unit, uint32_t half, float limit, float weight,
                     Activated& activated) {
  const float(&total)[kUnitN / 2] = totals[unit];
#pragma unroll
  for (uint32_t i = 0; i < kColumns / 4; ++i) {
    const uint32_t at = i / 2 * 8 + half * 2 + i % 2;
    const float gate = ptx::min_nan(total[at], limit), up = ptx::min_magnitude(total[at + 4], limit);
    activated[i] = ptx::mul_rn(ptx::mul_rn(silu(gate), up), weight);
  }
}
