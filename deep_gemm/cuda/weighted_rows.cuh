// Sums of rows of BF16, each times a weight, in order. Each product and each addition is rounded to FP32 by itself, and a sum
// once to BF16, so the bits are the same each time.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr uint32_t kColumns = 8;  // of a thread: 16 bytes
constexpr uint32_t kAtOnce = 8;   // rows under way at a time

// Adds columns from `column` on of a token's rows, which are `pitch` elements apart: route `first_route` + j has the row of that
// number in row_of, none if it is negative, and that weight. Tells whether there was any row.
template <typename WeightOf>
DEVICE bool add_rows(float (&total)[kColumns], const uint8_t* y, uint64_t pitch, uint32_t column, const int32_t* row_of,
                     uint64_t first_route, uint32_t topk, const WeightOf& weight_of) {
  bool has_rows = false;
#pragma unroll 1
  for (uint32_t first = 0; first < topk; first += kAtOnce) {
    int32_t rows[kAtOnce];
    ptx::Uint4 loaded[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      rows[i] = first + i < topk ? ptx::ld_global_i32(row_of + first_route + first + i) : -1;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      if (rows[i] >= 0) loaded[i] = ptx::ld_global_v4_b32(y + (static_cast<uint64_t>(rows[i]) * pitch + column) * 2);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0) continue;
      has_rows = true;
      const float weight = weight_of(first_route + first + i);
      const uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
      for (uint32_t pair = 0; pair < 4; ++pair) {
        const ptx::Float2 values = ptx::unpack_bf16(words[pair]);
        total[pair * 2] = ptx::add_rn(total[pair * 2], ptx::mul_rn(values.x, weight));
        total[pair * 2 + 1] = ptx::add_rn(total[pair * 2 + 1], ptx::mul_rn(values.y, weight));
      }
    }
  }
  return has_rows;
}

DEVICE void store_sums(uint8_t* to, const float (&total)[kColumns]) {
  ptx::st_global_v4_b32(to, ptx::pack_bf16(total[0], total[1]), ptx::pack_bf16(total[2], total[3]),
                        ptx::pack_bf16(total[4], total[5]), ptx::pack_bf16(total[6], total[7]));
}
