// Sets of lanes as masks, and sums over lanes.
#pragma once
#include "ptx/memory.cuh"
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

constexpr float kLeast = -3.402823466e38f;

// log(sum(exp(factor * x))): `of` gives a term as a power of 2, `log_of` the logarithm of the sum. `largest` is the
// largest x, or kLeast if all are -inf. The exponent that is subtracted is finite, so that -inf counts as nothing.
struct Powers {
  static constexpr float kLog2OfE = 1.44269504f, kLogOf2 = 0.693147181f;
  float scale, most;

  DEVICE Powers(float largest, float factor)
      : scale(ptx::mul_rn(factor, kLog2OfE)), most(ptx::max_f32(ptx::mul_rn(largest, scale), kLeast)) {}

  DEVICE float of(float x) const { return ptx::ex2_approx(ptx::fma_rn(x, scale, -most)); }
  DEVICE float log_of(float sum) const { return ptx::mul_rn(ptx::add_rn(ptx::lg2_approx(sum), most), kLogOf2); }
};
