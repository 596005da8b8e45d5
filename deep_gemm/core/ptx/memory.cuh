// Loads, stores, conversions. Kernels access memory only by these functions, so that the simulator sees every access.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// ---- Macros for wrappers that differ only in types and in the instruction. `address` is the asm operand for `from`.
#define PTX_LOAD(type, held, letter, name, pointer, address, instruction)            \
  DEVICE type name(pointer from) {                                                   \
    held value;                                                                      \
    asm volatile(instruction " %0, [%1];" : "=" letter(value) : address : "memory"); \
    return value;                                                                    \
  }
#define PTX_LOAD_V2(type, letter, name, pointer, address, instruction)                                    \
  DEVICE type name(pointer from) {                                                                        \
    type v;                                                                                               \
    asm volatile(instruction " {%0, %1}, [%2];" : "=" letter(v.x), "=" letter(v.y) : address : "memory"); \
    return v;                                                                                             \
  }
#define PTX_LOAD_V4(type, letter, name, pointer, address, instruction)                \
  DEVICE type name(pointer from) {                                                    \
    type v;                                                                           \
    asm volatile(instruction " {%0, %1, %2, %3}, [%4];"                               \
                 : "=" letter(v.x), "=" letter(v.y), "=" letter(v.z), "=" letter(v.w) \
                 : address                                                            \
                 : "memory");                                                         \
    return v;                                                                         \
  }
#define PTX_OF_ONE(type, letter, name, instruction)          \
  DEVICE type name(type x) {                                 \
    type y;                                                  \
    asm(instruction " %0, %1;" : "=" letter(y) : letter(x)); \
    return y;                                                \
  }
#define PTX_OF_TWO(type, letter, name, instruction)                         \
  DEVICE type name(type a, type b) {                                        \
    type c;                                                                 \
    asm(instruction " %0, %1, %2;" : "=" letter(c) : letter(a), letter(b)); \
    return c;                                                               \
  }

// Loads the line of 128 bytes that contains this address into the L2.
DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory"); }

// ---- Copies from global to shared memory, without registers

DEVICE void cp_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(shared)), "l"(global) : "memory");
}
// Waits for all cp_async copies of this thread. Other threads see the data after a barrier with this thread.
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Shared memory, accessed by a pointer. Some functions also accept an address from smem_address.

PTX_LOAD(float, float, "f", ld_shared_f32, uint32_t, "r"(from), "ld.shared.f32")
DEVICE float ld_shared_f32(const void* pointer) { return ld_shared_f32(smem_address(pointer)); }
PTX_LOAD_V2(Float2, "f", ld_shared_v2_f32, uint32_t, "r"(from), "ld.shared.v2.f32")
DEVICE Float2 ld_shared_v2_f32(const void* pointer) { return ld_shared_v2_f32(smem_address(pointer)); }
PTX_LOAD_V4(Float4, "f", ld_shared_v4_f32, uint32_t, "r"(from), "ld.shared.v4.f32")
DEVICE Float4 ld_shared_v4_f32(const void* pointer) { return ld_shared_v4_f32(smem_address(pointer)); }
PTX_LOAD(uint32_t, uint32_t, "r", ld_shared_b32, const void*, "r"(smem_address(from)), "ld.shared.b32")
PTX_LOAD(uint32_t, uint16_t, "h", ld_shared_u16, uint32_t, "r"(from), "ld.shared.u16")
PTX_LOAD_V2(Uint2, "r", ld_shared_v2_b32, const void*, "r"(smem_address(from)), "ld.shared.v2.b32")
PTX_LOAD_V4(Uint4, "r", ld_shared_v4_b32, uint32_t, "r"(from), "ld.shared.v4.b32")
DEVICE Uint4 ld_shared_v4_b32(const void* pointer) { return ld_shared_v4_b32(smem_address(pointer)); }
DEVICE void st_shared_b32(void* pointer, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem_address(pointer)), "r"(value) : "memory");
}
// Adds to a number in shared memory. Other threads of the CTA may add to it at the same time.
DEVICE void red_shared_add(uint32_t* pointer, uint32_t value) {
  asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(smem_address(pointer)), "r"(value) : "memory");
}
// Sets bits of a word in shared memory. Other threads of the CTA may set other bits at the same time.
DEVICE void red_shared_or(uint32_t* pointer, uint32_t bits) {
  asm volatile("red.relaxed.cta.shared.or.b32 [%0], %1;" ::"r"(smem_address(pointer)), "r"(bits) : "memory");
}
DEVICE void st_shared_f32(void* pointer, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem_address(pointer)), "f"(value) : "memory");
}
DEVICE void st_shared_v2_b32(void* pointer, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(smem_address(pointer)), "r"(a), "r"(b) : "memory");
}
DEVICE void st_shared_v2_f32(void* pointer, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem_address(pointer)), "f"(x), "f"(y) : "memory");
}
DEVICE void st_shared_v4_b32(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
DEVICE void st_shared_v4_b32(void* pointer, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  st_shared_v4_b32(smem_address(pointer), a, b, c, d);
}

// Stores four 8x8 matrices of 16-bit elements. `row` of lane i is the address of row i (16 bytes) of the 32 rows of all
// matrices. From each matrix, lane i has elements 2 * (i % 4) and 2 * (i % 4) + 1 of row i / 4. (PTX ISA, "stmatrix".)
DEVICE void stmatrix_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- Global memory. ".nc": no thread may write this memory while the kernel runs.

PTX_LOAD(float, float, "f", ld_global_f32, const void*, "l"(from), "ld.global.f32")
PTX_LOAD_V2(Float2, "f", ld_global_v2_f32, const void*, "l"(from), "ld.global.v2.f32")
PTX_LOAD_V4(Float4, "f", ld_global_v4_f32, const void*, "l"(from), "ld.global.v4.f32")
PTX_LOAD(uint32_t, uint32_t, "r", ld_global_b32, const void*, "l"(from), "ld.global.b32")
PTX_LOAD_V2(Uint2, "r", ld_global_v2_b32, const void*, "l"(from), "ld.global.v2.b32")
PTX_LOAD(uint32_t, uint16_t, "h", ld_global_b16, const void*, "l"(from), "ld.global.b16")
PTX_LOAD_V4(Uint4, "r", ld_global_v4_b32, const void*, "l"(from), "ld.global.v4.b32")
DEVICE int32_t ld_global_i32(const void* pointer) { return static_cast<int32_t>(ld_global_b32(pointer)); }

// Not volatile: memory that cannot change may be loaded early, late, or not at all.
DEVICE float ld_global_nc_f32(const void* pointer) {
  float value;
  asm("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(pointer));
  return value;
}
DEVICE uint32_t ld_global_nc_b16(const void* pointer) {
  uint16_t value;
  asm("ld.global.nc.b16 %0, [%1];" : "=h"(value) : "l"(pointer));
  return value;
}
DEVICE uint32_t ld_global_nc_b32(const void* pointer) {
  uint32_t value;
  asm("ld.global.nc.b32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
DEVICE int32_t ld_global_nc_i32(const void* pointer) { return static_cast<int32_t>(ld_global_nc_b32(pointer)); }
DEVICE Uint4 ld_global_nc_v4_b32(const void* pointer) {
  Uint4 v;
  asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(pointer));
  return v;
}

DEVICE void st_global_b8(void* pointer, uint32_t value) {
  asm volatile("st.global.b8 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
// Stores the lower half of `value`.
DEVICE void st_global_b16(void* pointer, uint32_t value) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(pointer), "h"(static_cast<uint16_t>(value)) : "memory");
}
DEVICE void st_global_f32(void* pointer, float value) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(pointer), "f"(value) : "memory");
}
DEVICE void st_global_b32(void* pointer, uint32_t value) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
DEVICE void st_global_v2_b32(void* pointer, uint32_t a, uint32_t b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(pointer), "r"(a), "r"(b) : "memory");
}
DEVICE void st_global_v2_f32(void* pointer, float x, float y) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(pointer), "f"(x), "f"(y) : "memory");
}
DEVICE void st_global_v4_f32(void* pointer, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
DEVICE void st_global_v4_b32(void* pointer, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Returns the value before the addition. It is relaxed: it orders no other access.
DEVICE uint32_t atom_add(uint32_t* pointer, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(pointer), "r"(value) : "memory");
  return before;
}

// Acquires and releases, so a CTA that counts with it sees the stores of all CTAs that counted earlier.
DEVICE uint32_t atom_add_acq_rel_b32(uint32_t* pointer, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(pointer), "r"(value) : "memory");
  return before;
}
// Between kernels of a GPU: a thread that acquires the sum sees all earlier stores that the adding threads made or saw.
DEVICE void red_release_gpu_add_b32(uint32_t* pointer, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
DEVICE uint32_t ld_acquire_gpu_b32(const uint32_t* pointer) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}
// Reads from the L2, since an L1 may hold an old value that an earlier kernel read.
PTX_LOAD(uint32_t, uint32_t, "r", ld_relaxed_gpu_b32, const void*, "l"(from), "ld.relaxed.gpu.global.b32")
// Between GPUs: a thread that acquires a released value sees all earlier stores that the releasing thread made or saw.
DEVICE void st_release_sys_b32(uint32_t* pointer, uint32_t value) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}
PTX_LOAD(uint32_t, uint32_t, "r", ld_acquire_sys_b32, const uint32_t*, "l"(from), "ld.acquire.sys.global.b32")
// The GPU's clock, in nanoseconds.
DEVICE uint64_t global_timer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

// ---- Arithmetic

// Volatile, so that the FFMA stays behind the wait for the WGMMA whose sums it reads. No register needs a fence then.
DEVICE float fma(float a, float b, float c) {
  float d;
  asm volatile("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
// Each result is rounded: the compiler does not merge a product and a sum into an fma.
PTX_OF_TWO(float, "f", mul_rn, "mul.rn.f32")
PTX_OF_TWO(float, "f", add_rn, "add.rn.f32")
DEVICE float fma_rn(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
// 2^x, 1 / x and log2(x), with errors up to 2^-22, 2^-23 and 2^-22. Results below the smallest normal number become 0.
PTX_OF_ONE(float, "f", ex2_approx, "ex2.approx.ftz.f32")
PTX_OF_ONE(float, "f", rcp_approx, "rcp.approx.ftz.f32")
PTX_OF_ONE(float, "f", lg2_approx, "lg2.approx.ftz.f32")
// The smaller number; NaN if either is NaN.
PTX_OF_TWO(float, "f", min_nan, "min.NaN.f32")
// The smaller magnitude, with the sign of `a` if `b` is positive; NaN if either is NaN.
PTX_OF_TWO(float, "f", min_magnitude, "min.NaN.xorsign.abs.f32")
PTX_OF_ONE(float, "f", abs_f32, "abs.f32")
// The larger number; of packed pairs, in each half. A NaN counts as less than any number.
PTX_OF_TWO(float, "f", max_f32, "max.f32")
PTX_OF_TWO(uint32_t, "r", max_bf16x2, "max.bf16x2")
PTX_OF_TWO(uint32_t, "r", max_f16x2, "max.f16x2")
// The larger number, but NaN if either is NaN.
PTX_OF_TWO(float, "f", max_nan_f32, "max.NaN.f32")
PTX_OF_TWO(uint32_t, "r", max_nan_bf16x2, "max.NaN.bf16x2")
PTX_OF_TWO(uint32_t, "r", max_nan_f16x2, "max.NaN.f16x2")
// Converts two FP32 to two E4M3, rounded to nearest even, with `low` in the lower byte. Magnitudes above 448, also
// infinities, become 448 with the number's sign; a NaN becomes 0x7f.
DEVICE uint32_t pack_e4m3(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
// Converts two FP32 to two BF16, rounded to nearest even, with `low` in the lower half.
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Converts two BF16 to FP32: a BF16 number is the upper half of the FP32 number.
DEVICE Float2 unpack_bf16(uint32_t packed) {
  Float2 v;
  asm("shl.b32 %0, %1, 16;" : "=f"(v.x) : "r"(packed));
  asm("and.b32 %0, %1, 0xffff0000;" : "=f"(v.y) : "r"(packed));
  return v;
}
// Converts two FP16 to FP32, exactly.
DEVICE Float2 unpack_f16(uint32_t packed) {
  Float2 v;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(v.x), "=f"(v.y)
      : "r"(packed));
  return v;
}
// Picks four of the eight bytes of `low` and `high`. Each of the four hexadecimal digits of `selector` is the number of
// a byte, 0 to 7. (PTX ISA, "prmt".)
DEVICE uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

DEVICE uint32_t bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(uint32_t bits) { return __uint_as_float(bits); }

}  // namespace ptx
