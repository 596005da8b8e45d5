// The parameters that gather_weighted and gather_weighted_many share, and the weights of routes.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "types.cuh"

struct GatherParams {
  const uint8_t* y;         // BF16 [rows, n]
  const int32_t* row_of;    // [tokens, topk], -1: the route has no row
  const uint8_t* weights;   // [tokens, topk], of kWeightBytes each; the weights of one token are adjacent
  uint8_t* out;             // BF16 [tokens, n]
  uint64_t y_pitch, weights_pitch, out_pitch;  // in elements
  uint32_t tokens, topk, n;
};
#include "gather_params_layout.cuh"  // asserts the layout that core/params.py packs

DEVICE int32_t row_of(const GatherParams& p, uint32_t token, uint32_t j) {
  return ptx::ld_global_i32(p.row_of + uint64_t{token} * p.topk + j);
}

DEVICE float weight_of(const GatherParams& p, uint32_t token, uint32_t j) {
  const uint8_t* at = p.weights + (uint64_t{token} * p.weights_pitch + j) * kWeightBytes;
  if constexpr (kWeightBytes == 0)
    return 1.f;
  else if constexpr (kWeightBytes == 4)
    return ptx::ld_global_f32(at);
  else
    return kWeightIsFp16 ? ptx::unpack_f16(ptx::ld_global_b16(at)).x : ptx::unpack_bf16(ptx::ld_global_b16(at)).x;
}

DEVICE const uint8_t* row_at(const GatherParams& p, uint32_t row, uint32_t column) {
  return p.y + (uint64_t{row} * p.y_pitch + column) * 2;
}

DEVICE uint8_t* sums_at(const GatherParams& p, uint32_t token, uint32_t column) {
  return p.out + (uint64_t{token} * p.out_pitch + column) * 2;
}

// Adds a BF16 row times its weight to a total. Each product and each addition is rounded to FP32 separately, and the total is
// rounded once to BF16, so the bits are always the same.
constexpr uint32_t kColumns = 8;  // columns of a thread: 16 bytes

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
