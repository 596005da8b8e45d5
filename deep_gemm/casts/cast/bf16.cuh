// A piece cast to BF16: the numbers themselves, rounded, without scales.
#pragma once
#include "cast/values.cuh"

constexpr float kLargestValue = kLargest;  // unused, as there are no scales

// Two numbers in a word.
struct Values {
  uint32_t words[kElements / 2];

  DEVICE void store_one(uint8_t* row, uint32_t column, uint32_t i) const {
    ptx::st_global_b16(row + uint64_t{column} * 2, words[i / 2] >> i % 2 * 16);
  }

  DEVICE void store(uint8_t* row, uint32_t column) const {
    uint8_t* to = row + uint64_t{column} * 2;
    if constexpr (kVector == 8)
      ptx::st_global_v4_b32(to, words[0], words[1], words[2], words[3]);
    else
      ptx::st_global_v2_b32(to, words[0], words[1]);
  }
};

DEVICE Values pack_values(const float (&v)[kElements]) {
  Values values;
#pragma unroll
  for (uint32_t i = 0; i < kElements; i += 2) values.words[i / 2] = ptx::pack_bf16(v[i], v[i + 1]);
  return values;
}
