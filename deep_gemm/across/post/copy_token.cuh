// Copies a token's values and scales unchanged to its row: FP8, or BF16, which has no scales.
#pragma once
#include "ptx/memory.cuh"

DEVICE void put_token(const PostParams& p, uint8_t* row, uint32_t token, uint32_t blocks) {
  const uint8_t* values = p.x + uint64_t{token} * p.x_pitch;
  const uint8_t* scales = p.sf + uint64_t{token} * p.sf_pitch;
#pragma unroll 1
  for (uint32_t at = ptx::thread_index() * 16; at < p.hidden; at += kNumThreads * 16) {
    const ptx::Uint4 piece = ptx::ld_global_nc_v4_b32(values + at);
    ptx::st_global_v4_b32(row + at, piece.x, piece.y, piece.z, piece.w);
  }
#pragma unroll 1
  for (uint32_t block = ptx::thread_index(); block < blocks; block += kNumThreads)
    ptx::st_global_f32(row + p.hidden + block * 4, ptx::ld_global_f32(scales + block * 4));
}
