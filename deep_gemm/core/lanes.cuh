// Sets of lanes as masks, and sums over lanes.
#pragma once
#include "ptx/warp.cuh"

// The lowest lane of a set.
DEVICE uint32_t lowest(uint32_t lanes) { return ptx::popc((lanes & -lanes) - 1); }

// The sum of this lane's value and of all values of lower lanes.
DEVICE uint32_t sum_up_to_lane(uint32_t value, uint32_t lane) {
  uint32_t sum = value;
#pragma unroll
  for (uint32_t distance = 1; distance < 32; distance *= 2) {
    const uint32_t below = ptx::shfl_sync(sum, lane - distance);
    sum += lane >= distance ? below : 0;
  }
  return sum;
}
