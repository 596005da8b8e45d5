// WGMMA: the tensor core's asynchronous product of one warpgroup. (PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions".)
//
// The steps of a batch of WGMMAs: fence_registers(d), wgmma_fence, wgmma_m64k32_e4m3 ..., wgmma_commit_group,
// fence_registers(d), wgmma_wait_group. Only after the wait may code read d and free the operands' shared memory.
// fence_registers is not needed if only volatile asm reads or writes d: the compiler keeps volatile asm in order.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// The descriptor of a K-major operand tile: rows of 128 bytes, 128-byte swizzle, a group of 8 rows every 1024 bytes.
// (PTX ISA, "Matrix Descriptor Format".) The low word has only address / 16, because this layout does not use the
// offset of the leading dimension. The high word has the stride, 1024 / 16, and in bits 62 and 63 the swizzle mode, 1.
// Code keeps only low words, because a 64-bit addition costs two 32-bit ones. A step of 32 bytes along k adds 2.
constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 / 16;

DEVICE uint32_t smem_descriptor_low(uint32_t address) { return address >> 4; }
DEVICE uint64_t smem_descriptor_from_low(uint32_t low) { return static_cast<uint64_t>(kDescriptorHigh) << 32 | low; }
DEVICE uint64_t smem_descriptor(uint32_t address) { return smem_descriptor_from_low(smem_descriptor_low(address)); }

// Needed before the first WGMMA, and again after code has accessed registers that a WGMMA uses.
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

// d = A @ B.T, 128 deep, a swizzled row: four WGMMAs, from zero. The arguments are the low words of descriptors.
// One asm has all four, because each asm that names the accumulators costs the compiler milliseconds.
template <uint32_t N, uint32_t kExponentBitsOfB = 4>
DEVICE void wgmma_m64k128_e4m3(float (&d)[N / 2], uint32_t a_low, uint32_t b_low) {
  static_assert(N == 0, "wgmma_header() was not asked for this N");
}

// Like the two functions above, from zero, with the 64 rows of A in registers. `a` has a thread's fragments, each of
// four words with four values. The fragments must not change before the wait for the WGMMA, which ptxas ensures.
template <uint32_t N>
DEVICE void wgmma_registers_m64k32_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b_low) {
  static_assert(N == 0, "wgmma_header() was not asked for this N of registers");
}
template <uint32_t N>
DEVICE void wgmma_registers_m64k128_e4m3(float (&d)[N / 2], const uint32_t (&a)[16], uint32_t b_low) {
  static_assert(N == 0, "wgmma_header() was not asked for this N of registers");
}

// A WGMMA of BF16 operands, 16 deep. A row of a K-major operand is 64 elements along k in 128 bytes, laid out as above.
// A row of an MN-major operand is 64 elements along m or n. 8 rows are 8 elements of k, and the next 8 begin at 1024
// bytes. The descriptor has the offset of the next 64 elements of m or n. (PTX ISA, "Strides".)
template <uint32_t N, bool kAIsMnMajor = false, bool kBIsMnMajor = false>
DEVICE void wgmma_m64k16_bf16(float (&d)[N / 2], uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  static_assert(N == 0, "wgmma_bf16_header() was not asked for this N and these majors");
}

// Four of these WGMMAs, 64 deep, in one asm: a swizzled row of a K-major operand, or 64 rows of an MN-major operand.
template <uint32_t N, bool kAIsMnMajor = false, bool kBIsMnMajor = false>
DEVICE void wgmma_m64k64_bf16(float (&d)[N / 2], uint32_t a_low, uint32_t b_low, bool accumulate) {
  static_assert(N == 0, "wgmma_bf16_header() was not asked for this N and these majors");
}

// The low word of an MN-major operand's descriptor; the high word is kDescriptorHigh. The next 64 elements of m or n
// are `bytes_to_next` behind. The mask removes a CTA's rank in its cluster from the address.
DEVICE uint32_t mn_major_descriptor_low(uint32_t address, uint32_t bytes_to_next) {
  return (address & 0xffffff) >> 4 | bytes_to_next / 16 << 16;
}

// The high word of the descriptor of a K-major tile. Its rows and its swizzle have 128, 64 or 32 bytes (modes 1, 2 and
// 3). The layout is the same: groups of 8 rows.
DEVICE_CONSTEXPR uint32_t descriptor_high(uint32_t row_bytes) {
  return (row_bytes == 128 ? 1u : row_bytes == 64 ? 2u : 3u) << 30 | row_bytes * 8 / 16;
}

}  // namespace ptx

#include "wgmma_shapes.cuh"

namespace ptx {

// d = A @ B.T from zero, for rows of kDepth bytes, which is also the span of their swizzle.
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
