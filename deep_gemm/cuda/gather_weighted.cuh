// What experts gave of each token, summed up: out[t] = sum over j of weights[t, j] * y[row_of[t, j]], in order of j.
//
// Each product and each addition is rounded to FP32 by itself, and the sum once to BF16, so the bits are the same each time.
// A thread has 8 columns of a token: 16 bytes of each of its rows, all of which are on their way before it adds.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct GatherParams {
  const uint8_t* y;         // BF16 [rows, n]
  const int32_t* row_of;    // [tokens, topk], -1: the route has no row
  const uint8_t* weights;   // [tokens, topk], of kWeightBytes
  uint8_t* out;             // BF16 [tokens, n]
  uint64_t y_pitch, out_pitch;  // in elements
  uint32_t tokens, topk, n;
};
#include "gather_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

constexpr uint32_t kColumns = 8;  // of a thread
constexpr uint32_t kAtOnce = 8;   // rows under way at a time

DEVICE float weight_of(const GatherParams& p, uint64_t route) {
  const uint8_t* at = p.weights + route * kWeightBytes;
  if constexpr (kWeightBytes == 4)
    return ptx::ld_global_f32(at);
  else
    return kWeightIsFp16 ? ptx::unpack_f16(ptx::ld_global_b16(at)).x : ptx::unpack_bf16(ptx::ld_global_b16(at)).x;
}

KERNEL(kNumThreads, 8) gather_weighted(GRID_CONSTANT GatherParams p) {
  const uint32_t pieces = p.n / kColumns, per_token = ceil_div(pieces, kNumThreads);
  const uint32_t token = ptx::block_index() / per_token;
  const uint32_t piece = ptx::block_index() % per_token * kNumThreads + ptx::thread_index();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait
  if (piece >= pieces) return;

  float total[kColumns] = {};
  const uint64_t first_route = static_cast<uint64_t>(token) * p.topk;
#pragma unroll 1
  for (uint32_t first = 0; first < p.topk; first += kAtOnce) {
    int32_t rows[kAtOnce];
    ptx::Uint4 loaded[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      rows[i] = first + i < p.topk ? ptx::ld_global_i32(p.row_of + first_route + first + i) : -1;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      if (rows[i] >= 0)
        loaded[i] = ptx::ld_global_v4_b32(p.y + (static_cast<uint64_t>(rows[i]) * p.y_pitch + piece * kColumns) * 2);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (rows[i] < 0) continue;
      const float weight = weight_of(p, first_route + first + i);
      const uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
      for (uint32_t pair = 0; pair < 4; ++pair) {
        const ptx::Float2 values = ptx::unpack_bf16(words[pair]);
        total[pair * 2] = ptx::add_rn(total[pair * 2], ptx::mul_rn(values.x, weight));
        total[pair * 2 + 1] = ptx::add_rn(total[pair * 2 + 1], ptx::mul_rn(values.y, weight));
      }
    }
  }
  ptx::st_global_v4_b32(p.out + (static_cast<uint64_t>(token) * p.out_pitch + piece * kColumns) * 2,
                        ptx::pack_bf16(total[0], total[1]), ptx::pack_bf16(total[2], total[3]),
                        ptx::pack_bf16(total[4], total[5]), ptx::pack_bf16(total[6], total[7]));
}
