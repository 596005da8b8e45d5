// WGMMA: the tensor core's asynchronous product of one warpgroup. (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".)
//
// A batch of products goes: fence_registers(d), wgmma_fence, wgmma_m64k32_e4m3 ..., wgmma_commit_group,
// fence_registers(d), wgmma_wait_group. Only after it may d be read, and the operands' shared memory be given back.
// No fence is needed where nothing but a volatile asm reads or writes d: the compiler keeps these in order.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// Describes a K-major operand tile: rows of 128 bytes, 128-byte swizzle, groups of 8 rows that follow each other at
// 1024 bytes. (PTX ISA, "Matrix Descriptor Format".) The low word is address / 16 alone, because this layout does not
// use the offset of the leading dimension. The high word holds the stride, 1024 / 16, and from bit 62 on the swizzle's
// mode, 1. Keeping only low words, and adding to them, costs half of 64-bit arithmetic: 32 bytes along k are 2.
constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 / 16;

DEVICE uint32_t smem_descriptor_low(uint32_t address) { return address >> 4; }
DEVICE uint64_t smem_descriptor_from_low(uint32_t low) { return static_cast<uint64_t>(kDescriptorHigh) << 32 | low; }
DEVICE uint64_t smem_descriptor(uint32_t address) { return smem_descriptor_from_low(smem_descriptor_low(address)); }

// Before the first WGMMA, and whenever registers that it uses were touched.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the committed groups are unfinished.
template <int kPending>
DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d = (accumulate ? d : 0) + A @ B.T, 32 deep, for 64 rows of A in E4M3 and N rows of B in FP8 (kExponentBitsOfB).
// Defined in wgmma_shapes.cuh, a header that core/wgmma_header.py writes for the N and the type of B in use.
template <uint32_t N, uint32_t kExponentBitsOfB = 4>
DEVICE void wgmma_m64k32_e4m3(float (&d)[N / 2], uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  static_assert(N == 0, "wgmma_header() was not asked for this N");
}

// d = A @ B.T, 128 deep, the length of a swizzled row: four of these products, from zero, for descriptors whose low words
// are given. One asm, because each that names the accumulators costs the compiler milliseconds.
template <uint32_t N, uint32_t kExponentBitsOfB = 4>
DEVICE void wgmma_m64k128_e4m3(float (&d)[N / 2], uint32_t a_low, uint32_t b_low) {
  static_assert(N == 0, "wgmma_header() was not asked for this N");
}

// Both with the 64 rows of A in registers, from zero: `a` holds a thread's fragments, each four words of four values.
// They must not change before the wait for the product, which ptxas ensures.
template <uint32_t N>
DEVICE void wgmma_registers_m64k32_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b_low) {
  static_assert(N == 0, "wgmma_header() was not asked for this N of registers");
}
template <uint32_t N>
DEVICE void wgmma_registers_m64k128_e4m3(float (&d)[N / 2], const uint32_t (&a)[16], uint32_t b_low) {
  static_assert(N == 0, "wgmma_header() was not asked for this N of registers");
}

// Products of BF16 operands, 16 deep. An operand lies K-major as above, a row of 128 bytes being 64 elements along k; or
// MN-major: a row is 64 elements along m or n, 8 elements of k are 8 such rows, the next 8 follow at 1024 bytes, and the next
// 64 of m or n where its descriptor says. (PTX ISA, "Strides": leading dimension byte offset, stride dimension byte offset.)
template <uint32_t N, bool kAIsMnMajor = false, bool kBIsMnMajor = false>
DEVICE void wgmma_m64k16_bf16(float (&d)[N / 2], uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  static_assert(N == 0, "wgmma_bf16_header() was not asked for this N and these majors");
}

// Four of these products, 64 deep, in one asm: of a K-major operand a swizzled row, of an MN-major one 64 rows.
template <uint32_t N, bool kAIsMnMajor = false, bool kBIsMnMajor = false>
DEVICE void wgmma_m64k64_bf16(float (&d)[N / 2], uint32_t a_low, uint32_t b_low, bool accumulate) {
  static_assert(N == 0, "wgmma_bf16_header() was not asked for this N and these majors");
}

// Low word for an MN-major operand. Its next 64 elements of m or n lie `bytes_to_next` on; the high word is the same.
// In a cluster an address has the CTA's rank in its highest byte, which falls into unused bits of K-major descriptors.
DEVICE uint32_t mn_major_descriptor_low(uint32_t address, uint32_t bytes_to_next) {
  return (address & 0xffffff) >> 4 | bytes_to_next / 16 << 16;
}

// The high word of a descriptor of K-major tiles whose rows, and swizzle, have 128, 64 or 32 bytes: the same layout, with
// groups of 8 such rows. (Modes 1, 2 and 3.)
DEVICE_CONSTEXPR uint32_t descriptor_high(uint32_t row_bytes) {
  return (row_bytes == 128 ? 1u : row_bytes == 64 ? 2u : 3u) << 30 | row_bytes * 8 / 16;
}

}  // namespace ptx

#include "wgmma_shapes.cuh"

namespace ptx {

// d = A @ B.T from zero, for rows of kDepth bytes, as long as their swizzle.
template <uint32_t N, uint32_t kDepth>
DEVICE void wgmma_m64_e4m3(float (&d)[N / 2], uint32_t a_low, uint32_t b_low) {
  static_assert(kDepth == 32 || kDepth == 64 || kDepth == 128, "rows as long as a swizzle");
  if constexpr (kDepth == 128) {
    wgmma_m64k128_e4m3<N>(d, a_low, b_low);
  } else {
    constexpr uint64_t kHigh = static_cast<uint64_t>(descriptor_high(kDepth)) << 32;
#pragma unroll
    for (uint32_t k = 0; k < kDepth; k += 32) wgmma_m64k32_e4m3<N>(d, kHigh | (a_low + k / 16), kHigh | (b_low + k / 16), k != 0);
  }
}

}  // namespace ptx
