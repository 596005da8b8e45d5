// Sums of rows of BF16, each times a weight, in order. Each product and each addition is rounded to FP32 by itself, and a sum
// once to BF16, so the bits are the same each time.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr uint32_t kColumns = 8;  // of a thread: 16 bytes

DEVICE void add_row(float (&total)[kColumns], const ptx::Uint4& row, float weight) {
  const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
  for (uint32_t pair = 0; pair < 4; ++pair) {
    const ptx::Float2 values = ptx::unpack_bf16(words[pair]);
    total[pair * 2] = ptx::add_rn(total[pair * 2], ptx::mul_rn(values.x, weight));
    total[pair * 2 + 1] = ptx::add_rn(total[pair * 2 + 1], ptx::mul_rn(values.y, weight));
  }
}

DEVICE void store_sums(uint8_t* to, const float (&total)[kColumns]) {
  ptx::st_global_v4_b32(to, ptx::pack_bf16(total[0], total[1]), ptx::pack_bf16(total[2], total[3]),
                        ptx::pack_bf16(total[4], total[5]), ptx::pack_bf16(total[6], total[7]));
}
