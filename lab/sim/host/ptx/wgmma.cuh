#pragma once
#include "ptx/platform.cuh"

namespace sim {
void wgmma_m64k32_e4m3(float* d, uint32_t n, uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate,
                       uint32_t exponent_bits_of_b);
void wgmma_registers_m64k32_e4m3(float* d, uint32_t n, const uint32_t* a, uint64_t descriptor_b, bool accumulate);
void wgmma_m64k16_bf16(float* d, uint32_t n, uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate,
                       bool a_is_mn_major, bool b_is_mn_major);
void wgmma_wait_group(uint32_t pending);
}  // namespace sim

namespace ptx {

constexpr uint32_t kDescriptorHigh = 1u << 30 | 1024 / 16;

inline uint32_t smem_descriptor_low(uint32_t address) { return address >> 4; }
inline uint64_t smem_descriptor_from_low(uint32_t low) { return static_cast<uint64_t>(kDescriptorHigh) << 32 | low; }
inline uint64_t smem_descriptor(uint32_t address) { return smem_descriptor_from_low(smem_descriptor_low(address)); }

void wgmma_fence();
void wgmma_commit_group();

template <int kPending>
void wgmma_wait_group() {
  sim::wgmma_wait_group(kPending);
}

template <uint32_t kCount>
void fence_registers(float (&)[kCount]) {}

template <uint32_t N, uint32_t kExponentBitsOfB = 4>
void wgmma_m64k32_e4m3(float (&d)[N / 2], uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  static_assert(N >= 8 && N <= 256 && N % 8 == 0, "WGMMA needs an N from 8 to 256 that is a multiple of 8");
  sim::wgmma_m64k32_e4m3(d, N, descriptor_a, descriptor_b, accumulate, kExponentBitsOfB);
}

template <uint32_t N, uint32_t kExponentBitsOfB = 4>
void wgmma_m64k128_e4m3(float (&d)[N / 2], uint32_t a_low, uint32_t b_low) {
  for (uint32_t k = 0; k < 128; k += 32)
    wgmma_m64k32_e4m3<N, kExponentBitsOfB>(d, smem_descriptor_from_low(a_low + k / 16),
                                           smem_descriptor_from_low(b_low + k / 16), k != 0);
}

template <uint32_t N>
void wgmma_registers_m64k32_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b_low) {
  sim::wgmma_registers_m64k32_e4m3(d, N, a, smem_descriptor_from_low(b_low), false);
}

template <uint32_t N>
void wgmma_registers_m64k128_e4m3(float (&d)[N / 2], const uint32_t (&a)[16], uint32_t b_low) {
  for (uint32_t i = 0; i < 4; ++i)
    sim::wgmma_registers_m64k32_e4m3(d, N, a + i * 4, smem_descriptor_from_low(b_low + i * 2), i != 0);
}

inline uint32_t mn_major_descriptor_low(uint32_t address, uint32_t bytes_to_next) {
  return (address & 0xffffff) >> 4 | bytes_to_next / 16 << 16;
}

template <uint32_t N, bool kAIsMnMajor = false, bool kBIsMnMajor = false>
void wgmma_m64k16_bf16(float (&d)[N / 2], uint64_t descriptor_a, uint64_t descriptor_b, bool accumulate) {
  static_assert(N >= 8 && N <= 256 && N % 8 == 0, "WGMMA needs an N from 8 to 256 that is a multiple of 8");
  sim::wgmma_m64k16_bf16(d, N, descriptor_a, descriptor_b, accumulate, kAIsMnMajor, kBIsMnMajor);
}

template <uint32_t N, bool kAIsMnMajor = false, bool kBIsMnMajor = false>
void wgmma_m64k64_bf16(float (&d)[N / 2], uint32_t a_low, uint32_t b_low, bool accumulate) {
  for (uint32_t i = 0; i < 4; ++i)
    wgmma_m64k16_bf16<N, kAIsMnMajor, kBIsMnMajor>(d, smem_descriptor_from_low(a_low + i * (kAIsMnMajor ? 128 : 2)),
                                                   smem_descriptor_from_low(b_low + i * (kBIsMnMajor ? 128 : 2)),
                                                   i != 0 || accumulate);
}

constexpr uint32_t descriptor_high(uint32_t row_bytes) {
  return (row_bytes == 128 ? 1u : row_bytes == 64 ? 2u : 3u) << 30 | row_bytes * 8 / 16;
}

template <uint32_t N, uint32_t kDepth>
void wgmma_m64_e4m3(float (&d)[N / 2], uint32_t a_low, uint32_t b_low) {
  static_assert(kDepth == 32 || kDepth == 64 || kDepth == 128, "rows as long as a swizzle");
  const uint64_t high = static_cast<uint64_t>(descriptor_high(kDepth)) << 32;
  for (uint32_t k = 0; k < kDepth; k += 32)
    wgmma_m64k32_e4m3<N>(d, high | (a_low + k / 16), high | (b_low + k / 16), k != 0);
}

}  // namespace ptx
