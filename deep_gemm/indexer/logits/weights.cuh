// Weights of the columns of a unit, in shared memory, in the order in which WGMMA's accumulators need them.
//
//   given   weights[token, head]: column = token * heads + head
//   laid    a lane of quarter q = lane % 4 holds of each 8 columns those numbered 2q and 2q + 1. For each 16 columns, or
//           pair of eights, it finds its 4 weights in 16 bytes: [pair][q]{2q, 2q + 1, 8 + 2q, 8 + 2q + 1}
//
// So a warp reads the weights of 16 columns in one load of 64 bytes, which has no bank conflicts.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

// Floats that the weights of so many columns take; what the last pair lacks is never used.
DEVICE_CONSTEXPR uint32_t laid_weights(uint32_t columns) { return ceil_div(columns, 16) * 16; }

// Where the weight of a column lies, in floats from the first of its unit.
DEVICE_CONSTEXPR uint32_t place_of_weight(uint32_t column) {
  return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

// A lane's weights of a unit, read once and kept in registers: a fourth as many as there are columns.
template <uint32_t kColumns>
struct WeightsInRegisters {
  ptx::Float4 pairs[ceil_div(kColumns, 16)];

  DEVICE void load(const float* laid, uint32_t lane) {
    const uint32_t address = ptx::smem_address(laid) + lane % 4 * 16;
#pragma unroll
    for (uint32_t i = 0; i < ceil_div(kColumns, 16); ++i) pairs[i] = ptx::ld_shared_v4_f32(address + i * 64);
  }
};
