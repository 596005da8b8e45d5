// Softmax of a piece of logits, FP32 [rows, columns], times `scale`. Forward and backward:
//
//   log(sum(exp)) of each 128 columns -> sums;  the logit of the row's token -> chosen, if the piece has it
//   (onehot - exp(logit - lse)) * factor, in BF16 -> the beginning of the row's own memory
//
// A warp loads 4 blocks of 128 columns at a time. 8 lanes share a block: a lane loads 4 neighbouring columns in each of
// 4 loads, and the lanes add in a fixed order. Forward, a CTA has kChunk columns of a row. Backward, it has all
// columns, one chunk after another: the gradient of a chunk overwrites logits of this chunk and of earlier ones.
#pragma once
#include "config.cuh"
#include "lanes.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct SoftmaxParams {
  float* logits;
  const int32_t* tokens;  // each row's token, a column of the vocabulary
  const float* lse;       // of each row; `lse` and `factors` are used backward only
  const float* factors;
  float* sums;  // [rows, ceil(columns / 128)] at this pitch; `sums` and `chosen`, [rows], are used forward only
  float* chosen;
  uint32_t sums_pitch, columns;
  uint32_t first;  // the piece's first column in the vocabulary
  float scale;
};
#include "softmax_params_layout.cuh"  // asserts that the layout of SoftmaxParams is what core/params.py packs

constexpr uint32_t kHeld = 16;  // logits that a lane holds
constexpr uint32_t kLanes = kBlock / kHeld;
constexpr uint32_t kChunk = kNumThreads * kHeld;
constexpr uint32_t kMinusInfinity = 0xff800000;  // of FP32

// Returns the column of a lane's logit, counted from the lane's first column.
DEVICE uint32_t column_of(uint32_t i) { return i / 4 * (4 * kLanes) + i % 4; }

// log(sum(exp)) of a block times `scale`, in each of its lanes; epilogue/block_sums.cuh adds in the same order.
DEVICE float sum_of_block(const float (&x)[kHeld], float scale) {
  float most = kLeast, sums[2] = {};  // of the first two of every four columns, and of the last two
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i) most = ptx::max_f32(most, x[i]);
  for (uint32_t bits = 1; bits < kLanes; bits *= 2) most = ptx::max_f32(most, ptx::shfl_xor_sync(most, bits));
  const Powers powers(most, scale);
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i) sums[i % 4 / 2] = ptx::add_rn(sums[i % 4 / 2], powers.of(x[i]));
  for (uint32_t bits = 2; bits < kLanes; bits *= 2)
    for (float& sum : sums) sum = ptx::add_rn(sum, ptx::shfl_xor_sync(sum, bits));
  const float sum = ptx::add_rn(sums[0], sums[1]);
  return powers.log_of(ptx::add_rn(sum, ptx::shfl_xor_sync(sum, 1)));
}

KERNEL(kNumThreads, kCtasPerSm) softmax_piece(GRID_CONSTANT SoftmaxParams p) {
  const uint32_t chunks = ceil_div(p.columns, kChunk), row = ptx::block_index() / (kIsBackward ? 1 : chunks);
  const uint32_t thread = ptx::thread_index(), lane = thread % kLanes;
  const uint32_t end = kIsBackward ? chunks : ptx::block_index() % chunks + 1;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start, and runs up to its own wait

  float* logits = p.logits + static_cast<uint64_t>(row) * p.columns;
  const uint32_t token = ptx::ld_global_b32(p.tokens + row) - p.first;  // less than p.columns if the piece has it
  const float lse = kIsBackward ? ptx::ld_global_f32(p.lse + row) : 0;
  const float factor = kIsBackward ? ptx::ld_global_f32(p.factors + row) : 0;
#pragma unroll 1
  for (uint32_t chunk = kIsBackward ? 0 : end - 1; chunk < end; ++chunk) {
    const uint32_t block = chunk * (kChunk / kBlock) + thread / kLanes, first = block * kBlock + lane * 4;
    float x[kHeld];
#pragma unroll
    for (uint32_t i = 0; i < kHeld; i += 4) {
      const float nothing = ptx::float_of(kMinusInfinity);  // -inf for any scale
      ptx::Float4 four = {nothing, nothing, nothing, nothing};
      if (first + column_of(i) < p.columns) four = ptx::ld_global_v4_f32(logits + first + column_of(i));
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
    if constexpr (kIsBackward) {
#pragma unroll
      for (uint32_t i = 0; i < kHeld; ++i) {
        const float probability = ptx::ex2_approx(ptx::mul_rn(ptx::mul_rn(x[i], p.scale) - lse, Powers::kLog2OfE));
        x[i] = ptx::mul_rn((first + column_of(i) == token ? 1.f : 0.f) - probability, factor);
      }
      ptx::syncthreads();  // all threads have loaded their logits
#pragma unroll
      for (uint32_t i = 0; i < kHeld; i += 4)
        if (first + column_of(i) < p.columns)
          ptx::st_global_v2_b32(reinterpret_cast<uint16_t*>(logits) + first + column_of(i), ptx::pack_bf16(x[i], x[i + 1]),
                                ptx::pack_bf16(x[i + 2], x[i + 3]));
    } else {
      const float sum = sum_of_block(x, p.scale);
      if (lane == 0 && first < p.columns) ptx::st_global_f32(p.sums + static_cast<uint64_t>(row) * p.sums_pitch + block, sum);
      if (thread == 0 && chunk == 0 && token < p.columns)
        ptx::st_global_f32(p.chosen + row, ptx::mul_rn(ptx::ld_global_f32(logits + token), p.scale));
    }
  }
}
