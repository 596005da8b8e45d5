// The scale for a largest magnitude, and quotients by a scale, defined once for all casts to FP8.
//
// kIsOrdinary: the fast code, for blocks without infinities and without extremely small numbers. It detects other
// blocks, and then the same numbers are cast again by code that is always right.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr float kLargest = 448.f;                 // the largest E4M3 value
constexpr float kLeastScale = 1.1754943508e-38f;  // 2^-126, the smallest normal number

// A scale, and -1 / scale. Without kIsOrdinary: -1 / the scale's significand, which is in [1, 2).
struct Divisor {
  float scale, reciprocal;
};

DEVICE float significand_of(float scale) { return ptx::float_of((ptx::bits_of(scale) & 0x7fffff) | 0x3f800000); }

// The scale by which `amax`, the elements' largest magnitude, becomes `largest`. `amax` is at least `min_amax`.
DEVICE float scale_of(float amax, float min_amax, bool rounds_up, float largest = kLargest) {
  amax = amax < min_amax ? min_amax : amax;
  // The quotient is amax / largest, rounded as by a division. Only quotients below kLeastScale may differ.
  const float guess = amax * (1.f / largest);
  const float quotient = ptx::fma_rn(ptx::fma_rn(guess, -largest, amax), 1.f / largest, guess);
  const float least = quotient < kLeastScale ? kLeastScale : quotient;
  // Rounds up to a power of two: a carry from the mantissa increases the exponent.
  const float power = ptx::float_of((ptx::bits_of(least) + 0x7fffff) & 0x7f800000);
  return amax == 0.f ? 1.f : rounds_up ? power : least;
}

// 1 / scale, rounded as by a division, if scale and result are not so small or large that a step underflows.
DEVICE float reciprocal_of(float scale) {
  const float guess = ptx::rcp_approx(scale);
  return ptx::fma_rn(ptx::fma_rn(guess, -scale, 1.f), guess, guess);
}

template <bool kIsOrdinary>
DEVICE Divisor divisor_of(float amax, float min_amax, bool rounds_up, float largest = kLargest) {
  const float scale = scale_of(amax, min_amax, rounds_up, largest);
  return {scale, -reciprocal_of(kIsOrdinary ? scale : significand_of(scale))};
}

// Tells whether the fast quotients by this scale are right. A block with an infinity has scale NaN, or 0 if rounded up.
DEVICE bool is_ordinary(Divisor d) { return d.scale >= 0x1p-90f; }

// x / scale, rounded as by a division, for |x| <= 448 * scale (6 * scale in FP4, whose ties are ties of FP8). Zeros
// keep their signs. NaN and infinities become NaN. `guess` is wrong by at most two units in the last place; `excess` is
// exact. One step yields the division's quotient wherever a slightly different one may become another FP8 number.
// (The test of hard quotients has all such cases.) `excess` may underflow if the scale is tiny. So without kIsOrdinary,
// x and scale are first multiplied by a power of two that makes scale a significand. Then an underflow is zero in FP8.
template <bool kIsOrdinary>
DEVICE float quotient_of(float x, Divisor d) {
  if constexpr (!kIsOrdinary) {
    x *= ptx::float_of(0x7f000000 - (ptx::bits_of(d.scale) & 0x7f800000));
    d.scale = significand_of(d.scale);
  }
  const float guess = x * -d.reciprocal;
  const float excess = ptx::fma_rn(guess, d.scale, -x);
  return ptx::fma_rn(excess, d.reciprocal, guess);
}

DEVICE uint32_t pack_quotients(float a, float b, float c, float d) {
  return ptx::pack_e4m3(a, b) | ptx::pack_e4m3(c, d) << 16;
}
