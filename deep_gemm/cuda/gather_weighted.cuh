// What experts gave of each token, summed up: out[t] = sum over j of weights[t, j] * y[row_of[t, j]], in order of j.
// Without weights each is 1.
//
// A thread has 8 columns of a token: 16 bytes of each of its rows, all of which are on their way before it adds.
#pragma once
#include "config.cuh"
#include "ptx/warp.cuh"
#include "weighted_rows.cuh"

struct GatherParams {
  const uint8_t* y;         // BF16 [rows, n]
  const int32_t* row_of;    // [tokens, topk], -1: the route has no row
  const uint8_t* weights;   // [tokens, topk], of kWeightBytes; those of a token lie beside each other
  uint8_t* out;             // BF16 [tokens, n]
  uint64_t y_pitch, weights_pitch, out_pitch;  // in elements
  uint32_t tokens, topk, n;
};
#include "gather_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

DEVICE float weight_of(const uint8_t* weights, uint64_t j) {
  const uint8_t* at = weights + j * kWeightBytes;
  if constexpr (kWeightBytes == 0)
    return 1.f;
  else if constexpr (kWeightBytes == 4)
    return ptx::ld_global_f32(at);
  else
    return kWeightIsFp16 ? ptx::unpack_f16(ptx::ld_global_b16(at)).x : ptx::unpack_bf16(ptx::ld_global_b16(at)).x;
}

KERNEL(kNumThreads, 512 / kNumThreads) gather_weighted(GRID_CONSTANT GatherParams p) {
  const uint32_t pieces = p.n / kColumns, per_token = ceil_div(pieces, kNumThreads);
  const uint32_t token = ptx::block_index() / per_token;
  const uint32_t piece = ptx::block_index() % per_token * kNumThreads + ptx::thread_index();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait
  if (piece >= pieces) return;

  float total[kColumns] = {};
  const uint64_t first_route = static_cast<uint64_t>(token) * p.topk;
  const uint8_t* weights = p.weights + uint64_t{token} * p.weights_pitch * kWeightBytes;
  add_rows(total, p.y, p.y_pitch, piece * kColumns, p.row_of, first_route, p.topk,
           [&](uint64_t route) { return weight_of(weights, route - first_route); });
  store_sums(p.out + (static_cast<uint64_t>(token) * p.out_pitch + piece * kColumns) * 2, total);
}
