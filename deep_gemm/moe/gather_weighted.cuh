// Sums up each token's rows from its experts: out[t] = sum over j of weights[t, j] * y[row_of[t, j]], in order of j.
// Without weights every factor is 1.
//
// A thread sums 8 columns of a token: 16 bytes of each row. It loads up to kAtOnce rows before it adds them.
#pragma once
#include "gather/params.cuh"
#include "ptx/warp.cuh"

constexpr uint32_t kAtOnce = 8;  // rows loaded before the first is added

KERNEL(kNumThreads, kCtasPerSm) gather_weighted(GRID_CONSTANT GatherParams p) {
  const uint32_t pieces = p.n / kColumns, per_token = ceil_div(pieces, kNumThreads);
  const uint32_t token = ptx::block_index() / per_token;
  const uint32_t piece = ptx::block_index() % per_token * kNumThreads + ptx::thread_index();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  if (piece >= pieces) return;

  float total[kColumns] = {};
#pragma unroll 1
  for (uint32_t first = 0; first < p.topk; first += kAtOnce) {
    int32_t rows[kAtOnce];
    float weights[kAtOnce];
    ptx::Uint4 loaded[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) rows[i] = first + i < p.topk ? row_of(p, token, first + i) : -1;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      if (rows[i] >= 0) loaded[i] = ptx::ld_global_v4_b32(row_at(p, rows[i], piece * kColumns));
    // Loads the weights while the rows are on their way: loads issued after the rows would each add a wait.
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) weights[i] = first + i < p.topk ? weight_of(p, token, first + i) : 0.f;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      if (rows[i] >= 0) add_row(total, loaded[i], weights[i]);
  }
  store_sums(sums_at(p, token, piece * kColumns), total);
}
