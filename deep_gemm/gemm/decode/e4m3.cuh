// B in E4M3, with one scale for each 128x128 block.
#pragma once
#include "config.cuh"
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

// k-blocks whose scales are in shared memory at a time.
constexpr uint32_t kScaleBlocks = 32;
constexpr uint32_t kScalesPerThread = kScaleBlocks * kBlockTokens / kNumMathThreads;

using ScaleStorage = float[kScaleBlocks * kBlockTokens];

// sfa * sfb for 32 k-blocks: [k-block][token] in shared memory, and in registers before that. 64 or 128 columns of D
// share each of these numbers: a tile is within one 128x128 block of B.
struct Scales {
  float sfa[kScalesPerThread], sfb;

  // Indices past the last token or k-block load the last one's scale again: no address is outside. The loads are not
  // ".nc", which the compiler may move to before griddepcontrol_wait.
  DEVICE void load(const DecodeProduct& p, const Work& work, uint32_t first_k_block) {
    const auto k_block = [&](uint32_t i) {
      return first_k_block + i < work.end_k_block ? first_k_block + i : work.end_k_block - 1;
    };
    sfb = ptx::ld_global_f32(p.sfb + static_cast<uint64_t>(work.row_n / 128) * p.sfb_stride_n +
                             static_cast<uint64_t>(k_block(ptx::lane_index())) * p.sfb_stride_k);
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      const uint32_t token = work.row_m + index % kBlockTokens;
      sfa[i] = ptx::ld_global_f32(p.sfa + static_cast<uint64_t>(token < p.m ? token : p.m - 1) * p.sfa_stride_m +
                                  static_cast<uint64_t>(k_block(index / kBlockTokens)) * p.sfa_stride_k);
    }
  }

  DEVICE void store(const DecodeProduct&, uint32_t, float* scales) const {
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      ptx::st_shared_f32(scales + index, sfa[i] * ptx::shfl_sync(sfb, index / kBlockTokens));
    }
  }
};

// Multiplies this CTA's k-blocks. The scales of kScaleBlocks k-blocks are in shared memory at a time.
template <typename Storage>
DEVICE void multiply(const DecodeProduct& p, Storage& shared, const Work& work, RingPosition& at, float (&total)[kAccumulators]) {
  const uint32_t b_address = ptx::smem_address(shared.b) + ptx::warp_index() / 4 * 64 * kBlockK;
  const uint32_t a_address = ptx::smem_address(shared.a);
  multiply_with_scales<Scales, kScaleBlocks>(p, shared, work, total, [&](uint32_t, uint32_t count) {
    multiply_k_blocks(
        shared.ring, b_address, [&](uint32_t, uint32_t stage) { return a_address + stage * kABytes; }, shared.scales,
        count, at, total);
  });
}
