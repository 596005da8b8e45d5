// Sums each of kSlices slices of k from zero, and adds up the slices in order. The bits equal the bits from a cluster
// whose CTAs compute one slice each (epilogue/split.cuh).
#pragma once
#include "ptx/memory.cuh"
#include "slice.cuh"
#include CONVERT
#include EPILOGUE

// A thread's sums of earlier slices, while the next slice uses the registers of `total`. Used if registers cannot hold
// two sets of sums. The last kSharedSums sums are in the warpgroup's store buffers.
template <uint32_t kUnits>
struct Before {
  static constexpr uint32_t kColumns = kUnitN / 2, kSums = kUnits * kColumns, kKept = kSums - kSharedSums;
  static constexpr uint32_t kStep = 128 * 16;  // bytes of four sums of all threads
  static_assert(kSharedSums / 4 * kStep <= kNumStoreBuffers * kStoreBufferBytes, "store buffers have room");
  float kept[kKept];
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

template <uint32_t kUnits>
DEVICE void set_all(float (&total)[kUnits][kUnitN / 2], float value) {
#pragma unroll
  for (auto& unit : total)
#pragma unroll
    for (float& x : unit) x = value;
}

// Multiplies the k-blocks of one tile.
template <uint32_t kUnits>
DEVICE void multiply_tile(const Params& p, Ring& ring, const Operands& operands, const FirstScales&, const Tile& tile,
                          RingPosition& at, Passes&, const Share&, Output& output, float (&total)[kUnits][kUnitN / 2]) {
  const uint32_t k_blocks = k_blocks_of(p, tile).end;
  set_all(total, -0.0f);  // adding the first sum to -0 does not change its bits
#pragma unroll 1
  for (uint32_t slice = 0; slice < kSlices; ++slice) {
    const uint32_t first = k_blocks * slice / kSlices, end = k_blocks * (slice + 1) / kSlices;
    if constexpr (kSharedSums > 0) {
      if (first == end) continue;
      Before<kUnits> before;
      if (first != 0) before.keep(output, total);
      // Else ptxas takes old sums for an input of this slice's products, which then wait for each other (note C7517).
      set_all(total, 0);
      multiply_slice(ring, operands, end - first, at, total);
      if (first != 0) before.add_to(total);
    } else {
      float sum[kUnits][kUnitN / 2];
      multiply_slice(ring, operands, end - first, at, sum);
      if (first == end) continue;
#pragma unroll
      for (uint32_t unit = 0; unit < kUnits; ++unit)
#pragma unroll
        for (uint32_t i = 0; i < kUnitN / 2; ++i) total[unit][i] = ptx::add_rn(total[unit][i], sum[unit][i]);
    }
  }
}
