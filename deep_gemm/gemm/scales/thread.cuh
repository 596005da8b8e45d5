// The scales that a thread of a math warpgroup needs, and their addresses.
//
// In a 64 x n unit a thread holds rows lane / 4 and lane / 4 + 8 of its warp's 16 rows, and two of each 8 columns, from
// lane % 4 * 2 on. Accumulator 4 * g + i is in row i / 2 of both, and column i % 2 of pair g. (PTX ISA, "Register
// Fragments for wgmma.mma_async.m64nNk32".)
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "slot.cuh"

// Pointers to the scales of the thread's first row of A and of its first row of B (a column of D) in the ring's first
// slot. The next slot's scales are kScales further.
struct ThreadScales {
  const float *sfa = nullptr, *sfb = nullptr;

  DEVICE ThreadScales() {}
  DEVICE ThreadScales(const float* first_scales, uint32_t warpgroup)
      : sfa(&first_scales[warpgroup * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4]),
        sfb(first_scales + kScaleParts * kScaleRows + (kScalingWarps > 0 ? 0 : ptx::lane_index() % 4 * 2)) {}
};

// Loads the scales of the thread's two rows of a unit of A, from a pointer or from a shared address.
DEVICE void load_scales(const float* sfa, float (&scales)[2]) {
  scales[0] = ptx::ld_shared_f32(sfa);
  scales[1] = ptx::ld_shared_f32(sfa + 8);
}
DEVICE void load_scales(uint32_t sfa, float (&scales)[2]) {
  scales[0] = ptx::ld_shared_f32(sfa);
  scales[1] = ptx::ld_shared_f32(sfa + 8 * 4);
}
