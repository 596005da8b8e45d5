// Warpgroup matrix products, asynchronous: D (registers) += A (shared) x B (shared). (PTX ISA, "Asynchronous Warpgroup
// Level Matrix Multiply-Accumulate Instructions".) wgmma_m64k32_e4m3<n> itself is generated for the n that a
// configuration needs.
#pragma once
#include "ptx/memory.cuh"

namespace ptx {

// Operands along k in rows of 128 bytes with the 128-byte swizzle: address / 16 in the low word; in the high word the
// distance of 8-row atoms (1024 bytes / 16) and the swizzle mode, 1. The leading offset is not used.
// (PTX ISA, "Matrix Descriptor".)
DEVICE uint64_t smem_descriptor(uint32_t address) {
  constexpr uint32_t kHighWord = 1024 / 16 | 1u << 30;
  return static_cast<uint64_t>(kHighWord) << 32 | address >> 4;
}

// Before the first product of a batch: orders register and shared-memory accesses before the tensor cores' own.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kGroups>
DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Keeps the compiler from moving an accumulator across this point while a product writes it.
DEVICE void fence_register(float& value) { asm volatile("" : "+f"(value)::"memory"); }

}  // namespace ptx

#include "wgmma_shape.cuh"
