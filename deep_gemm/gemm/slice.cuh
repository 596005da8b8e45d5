// The loop of one math warpgroup over k-blocks of operands without scales: the tensor cores add up a slice of k in one
// set of accumulators, from zero. A k-block is multiplied while the next is issued; its slot is released after that.
#pragma once
#include "config.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include WORK

// Bytes of 64 rows of an operand in a slot, with either major.
constexpr uint32_t kBytesOf64Rows = 64 * kLineBytes;

template <bool kIsMnMajor>
DEVICE uint32_t descriptor_low(uint32_t address) {
  return kIsMnMajor ? ptx::mn_major_descriptor_low(address, kBytesOf64Rows) : ptx::smem_descriptor_low(address);
}

// One math warpgroup's operands in the ring's first slot: descriptors (their low words) of its first rows of A and of
// all of B. The loop adds multiples of a slot's size.
struct Operands {
  uint32_t a, b;

  DEVICE Operands(const uint8_t* first_a, const uint8_t* first_b, const float*, uint32_t warpgroup)
      : a(descriptor_low<kAIsMnMajor>(ptx::smem_address(first_a) + warpgroup * kBytesOf64Rows)),
        b(descriptor_low<kBIsMnMajor>(ptx::smem_address(first_b))) {}
};

// Without scales, there is nothing to load before a tile.
struct FirstScales {};
DEVICE void begin_scales(const Params&, const Tile&, FirstScales&) {}

// Multiplies the next `count` k-blocks as they arrive. If `count` is 0, the sums stay unchanged.
template <uint32_t kUnits>
DEVICE void multiply_slice(Ring& ring, const Operands& operands, uint32_t count, RingPosition& at,
                           float (&sum)[kUnits][kUnitN / 2]) {
  RingPosition last = at;
  if constexpr (kStoresAtOnce) {
#pragma unroll
    for (auto& unit : sum)
#pragma unroll
      for (float& x : unit) x = 0;
  }
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i) {
    wait_until_loaded(ring, at);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit)
      ptx::wgmma_m64k64_bf16<kUnitN, kAIsMnMajor, kBIsMnMajor>(
          sum[unit], operands.a + at.stage * (kABytes / 16) + row_of_unit(unit) * (kLineBytes / 16),
          operands.b + at.stage * (kBBytes / 16) + column_of_unit(unit) * (kLineBytes / 16), i != 0);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();
    if (i != 0) release(ring, last, ptx::lane_index());
    last = at;
    at = at.next();
  }
  ptx::wgmma_wait_group<0>();
#pragma unroll
  for (auto& unit : sum) ptx::fence_registers(unit);  // otherwise the compiler might read these before the wait
  if (count != 0) release(ring, last, ptx::lane_index());
}
