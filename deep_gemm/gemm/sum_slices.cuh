// Adds up the slices of a sum over products, in order: D = C + the sum over s of slices[s], where C is D or zero.
//
// A CTA has 128 columns of a row, 4 for each lane. Each warp adds up a part of the slices, and loads kAtOnce of them at
// a time; the first warp adds up the warps' sums. So the bits of a sum depend only on the number of slices.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct SlicesParams {
  const float* slices;  // [count, m, n], contiguous
  uint8_t* d;           // [m, n]
  uint64_t d_pitch;     // in elements
  uint32_t count, m, n;
};
#include "slices_params_layout.cuh"  // asserts that the layout of SlicesParams is what core/params.py packs

constexpr uint32_t kWarps = kNumThreads / 32;
constexpr uint32_t kColumns = 4;  // columns of a thread
constexpr uint32_t kAtOnce = 9;   // slices that a warp loads at a time

struct SharedStorage {
  alignas(16) float sums[kWarps][32][kColumns];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "SlicesConfig.shared_bytes and SharedStorage differ");

DEVICE void add(float (&sum)[kColumns], const ptx::Float4& more) {
  sum[0] = ptx::add_rn(sum[0], more.x);
  sum[1] = ptx::add_rn(sum[1], more.y);
  sum[2] = ptx::add_rn(sum[2], more.z);
  sum[3] = ptx::add_rn(sum[3], more.w);
}

KERNEL(kNumThreads, 4) sum_slices(GRID_CONSTANT SlicesParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t per_row = ceil_div(p.n, 32 * kColumns);
  const uint32_t row = ptx::block_index() / per_row, warp = ptx::warp_index(), lane = ptx::lane_index();
  const uint32_t column = (ptx::block_index() % per_row * 32 + lane) * kColumns;
  const bool is_any = column < p.n;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start, and runs up to its own wait

  float sum[kColumns] = {};
  if (is_any) {
    const uint64_t plane = static_cast<uint64_t>(p.m) * p.n;
    const float* at = p.slices + static_cast<uint64_t>(row) * p.n + column;
    const uint32_t end = p.count * (warp + 1) / kWarps;
#pragma unroll 1
    for (uint32_t first = p.count * warp / kWarps; first < end; first += kAtOnce) {
      ptx::Float4 loaded[kAtOnce];
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i < end) loaded[i] = ptx::ld_global_v4_f32(at + (first + i) * plane);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (first + i < end) add(sum, loaded[i]);
    }
  }
  ptx::st_shared_v4_b32(shared.sums[warp][lane], ptx::bits_of(sum[0]), ptx::bits_of(sum[1]), ptx::bits_of(sum[2]),
                        ptx::bits_of(sum[3]));
  ptx::syncthreads();
  if (warp != 0 || !is_any) return;

#pragma unroll
  for (uint32_t i = 1; i < kWarps; ++i) add(sum, ptx::ld_shared_v4_f32(shared.sums[i][lane]));
  uint8_t* to = p.d + (static_cast<uint64_t>(row) * p.d_pitch + column) * kOutputBytes;
  if constexpr (kAddsToD) add(sum, ptx::ld_global_v4_f32(to));
  if constexpr (kOutputBytes == 4)
    ptx::st_global_v4_f32(to, sum[0], sum[1], sum[2], sum[3]);
  else
    ptx::st_global_v2_b32(to, ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]));
}
