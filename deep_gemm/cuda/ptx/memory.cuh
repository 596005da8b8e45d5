// Loads and stores of single threads, conversions on the way, and matrix stores of a warp.
#pragma once
#include "types.cuh"

namespace ptx {

struct Float2 {
  float x, y;
};

DEVICE uint32_t smem_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

// The block's dynamic shared memory, as the struct that plans it.
template <typename Storage>
DEVICE Storage& dynamic_shared() {
  extern __shared__ __align__(1024) uint8_t bytes[];
  return *reinterpret_cast<Storage*>(bytes);
}

DEVICE float ld_shared_f32(const float* source) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem_address(source)) : "memory");
  return value;
}

DEVICE void st_shared_v2_f32(void* destination, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_address(destination)), "f"(x), "f"(y) : "memory");
}

// Through the read-only path, for data that no one writes while the kernel runs.
DEVICE float ld_global_nc_f32(const float* source) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(source));
  return value;
}

DEVICE uint32_t ld_global_b32(const void* source) {
  uint32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

DEVICE Float2 ld_global_v2_f32(const void* source) {
  Float2 value;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(source) : "memory");
  return value;
}

// Four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8; of each matrix a thread
// holds the two elements of row lane / 4 from column lane % 4 * 2 on. (PTX ISA, "stmatrix".)
DEVICE void stmatrix_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Two BF16 numbers in one register, the first in its low half, rounded to nearest even.
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

DEVICE Float2 unpack_bf16(uint32_t packed) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
}

DEVICE float fma(float x, float y, float z) { return __fmaf_rn(x, y, z); }

}  // namespace ptx
