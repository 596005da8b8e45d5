// A piece cast to FP8: E4M3 values, a byte each.
#pragma once
#include "cast/values.cuh"

constexpr float kLargestValue = kLargest;

// Four values in a word.
struct Values {
  uint32_t words[kElements / 4];

  DEVICE void store_one(uint8_t* row, uint32_t column, uint32_t i) const { ptx::st_global_b8(row + column, words[0] >> i * 8); }

  DEVICE void store(uint8_t* row, uint32_t column) const {
    if constexpr (kVector == 8)
      ptx::st_global_v2_b32(row + column, words[0], words[1]);
    else
      ptx::st_global_b32(row + column, words[0]);
  }
};

DEVICE Values pack_values(const float (&v)[kElements]) {
  Values values;
#pragma unroll
  for (uint32_t i = 0; i < kElements; i += 4) values.words[i / 4] = pack_quotients(v[i], v[i + 1], v[i + 2], v[i + 3]);
  return values;
}
