// A piece cast to BF16: the numbers themselves, rounded, without scales.
#pragma once
#include "cast/values.cuh"

constexpr float kLargestValue = kLargest;  // unused, as there are no scales

// Two numbers in a word.
struct Values {
  uint32_t words[kElements / 2];
};

DEVICE Values pack_values(const float (&v)[kElements]) {
  Values values;
#pragma unroll
  for (uint32_t i = 0; i < kElements; i += 2) values.words[i / 2] = ptx::pack_bf16(v[i], v[i + 1]);
  return values;
}

// `row` is the address of the first column's number.
DEVICE void store_values(uint8_t* row, uint32_t first_column, uint32_t end, uint32_t lane, const Values& values) {
  if constexpr (kVector == 1) {
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) {
      const uint32_t column = first_column + column_of(lane, i);
      if (column < end) ptx::st_global_b16(row + uint64_t{column} * 2, values.words[i / 2] >> i % 2 * 16);
    }
  } else {
    const uint32_t column = first_column + column_of(lane, 0);
    if (column >= end) return;
    uint8_t* to = row + uint64_t{column} * 2;
    if constexpr (kVector == 8)
      ptx::st_global_v4_b32(to, values.words[0], values.words[1], values.words[2], values.words[3]);
    else
      ptx::st_global_v2_b32(to, values.words[0], values.words[1]);
  }
}
