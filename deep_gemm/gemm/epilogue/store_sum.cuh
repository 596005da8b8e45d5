// Stores a sum over the CTAs of a cluster from registers to D.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"

// Stores one 16 x 8 chunk of a tile, summed over the CTAs, plus C, from a warp's registers to D.
DEVICE void store_sum(uint8_t* d, uint64_t d_pitch, const uint8_t* c, uint64_t c_pitch, const ptx::Float4& sum,
                      uint32_t row, uint32_t column, uint32_t m, uint32_t n, uint32_t lane) {
  const uint32_t first_column = column + lane % 4 * 2;
  if (first_column >= n) return;  // n is even: a pair is inside or outside
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t row_m = row + half * 8 + lane / 4;
    if (row_m >= m) continue;
    ptx::Float2 pair = half == 0 ? ptx::Float2{sum.x, sum.y} : ptx::Float2{sum.z, sum.w};
    if constexpr (kWithC) {
      const uint8_t* from = c + (row_m * c_pitch + first_column) * kCBytes;
      const ptx::Float2 addend = kCIsFp32 ? ptx::ld_global_v2_f32(from) : ptx::unpack_bf16(ptx::ld_global_b32(from));
      pair.x += addend.x;
      pair.y += addend.y;
    }
    uint8_t* to = d + (row_m * d_pitch + first_column) * kOutputBytes;
    if constexpr (kOutputIsFp32)
      ptx::st_global_v2_f32(to, pair.x, pair.y);
    else
      ptx::st_global_b32(to, ptx::pack_bf16(pair.x, pair.y));
  }
}
