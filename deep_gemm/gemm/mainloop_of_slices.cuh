// A tile's sums are those of kSlices slices of k, each summed from zero, added up in order: the bits that CTAs of a cluster give
// which take a slice each (epilogue/split.cuh).
#pragma once
#include "ptx/memory.cuh"
#include "skip.cuh"
#include "slice.cuh"

// What the slices before add up to, of one thread, while the next one has the registers of totals: in further registers, but for
// the last kSharedSums, which lie in the warpgroup's store buffers meanwhile.
template <uint32_t kUnits>
struct Before {
  static constexpr uint32_t kColumns = kUnitN / 2, kSums = kUnits * kColumns, kKept = kSums - kSharedSums;
  static constexpr uint32_t kStep = 128 * 16;  // bytes of four sums of all threads
  static_assert(kSharedSums / 4 * kStep <= kNumStoreBuffers * kStoreBufferBytes, "store buffers have room");
  float kept[kKept > 0 ? kKept : 1];
  uint8_t* shared;

  DEVICE void keep(Output& output, const float (&total)[kUnits][kUnitN / 2]) {
#pragma unroll
    for (uint32_t i = 0; i < kKept; ++i) kept[i] = total[i / kColumns][i % kColumns];
    shared = output.free_buffers() + ptx::thread_index() % 128 * 16;
#pragma unroll
    for (uint32_t i = kKept; i < kSums; i += 4) {
      const float* v = &total[i / kColumns][i % kColumns];
      ptx::st_shared_v4_b32(shared + (i - kKept) / 4 * kStep, ptx::bits_of(v[0]), ptx::bits_of(v[1]), ptx::bits_of(v[2]),
                            ptx::bits_of(v[3]));
    }
  }

  DEVICE void add_to(float (&total)[kUnits][kUnitN / 2]) const {
#pragma unroll
    for (uint32_t i = 0; i < kKept; ++i) add(total[i / kColumns][i % kColumns], kept[i]);
#pragma unroll
    for (uint32_t i = kKept; i < kSums; i += 4) {
      const ptx::Float4 before = ptx::ld_shared_v4_f32(shared + (i - kKept) / 4 * kStep);
      float* v = &total[i / kColumns][i % kColumns];
      add(v[0], before.x), add(v[1], before.y), add(v[2], before.z), add(v[3], before.w);
    }
  }

  DEVICE static void add(float& sum, float before) { sum = ptx::add_rn(before, sum); }
};

// Multiplies the k-blocks of one tile.
template <uint32_t kUnits>
DEVICE void multiply_tile(const Params& p, Ring& ring, const Operands& operands, const FirstScales&, const Tile& tile,
                          RingPosition& at, Passes&, const Share&, Output& output, float (&total)[kUnits][kUnitN / 2]) {
  const uint32_t k_blocks = k_blocks_of(p, tile).end;
  Before<kUnits> before;
#pragma unroll 1
  for (uint32_t slice = 0, first = 0; slice < kSlices; ++slice) {
    const uint32_t end = k_blocks * (slice + 1) / kSlices;
    if (first == end) continue;  // k-blocks may be fewer than slices
    if (first != 0) before.keep(output, total);
    // Or ptxas takes what was added for an input of this slice's products, and lets these wait for each other (note C7517).
#pragma unroll
    for (auto& unit : total)
#pragma unroll
      for (float& x : unit) x = 0;
    multiply_slice(ring, operands, end - first, at, total);
    if (first != 0) before.add_to(total);
    first = end;
  }
}
