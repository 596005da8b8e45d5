// A piece cast to FP8: E4M3 values, a byte each.
#pragma once
#include "cast/values.cuh"

constexpr float kLargestValue = kLargest;

// Four values in a word.
struct Values {
  uint32_t words[kElements / 4];
};

DEVICE Values pack_values(const float (&v)[kElements]) {
  Values values;
#pragma unroll
  for (uint32_t i = 0; i < kElements; i += 4) values.words[i / 4] = pack_quotients(v[i], v[i + 1], v[i + 2], v[i + 3]);
  return values;
}

// Stores a lane's values in the columns of its piece. `row` is the address of the first column's FP8 value.
DEVICE void store_values(uint8_t* row, uint32_t first_column, uint32_t end, uint32_t lane, const Values& values) {
  if constexpr (kVector == 1) {
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) {
      const uint32_t column = first_column + column_of(lane, i);
      if (column < end) ptx::st_global_b8(row + column, values.words[0] >> i * 8);
    }
  } else {
    const uint32_t column = first_column + column_of(lane, 0);
    if (column >= end) return;
    if constexpr (kVector == 8)
      ptx::st_global_v2_b32(row + column, values.words[0], values.words[1]);
    else
      ptx::st_global_b32(row + column, values.words[0]);
  }
}
