// From numbers to FP8: the scale that belongs to a largest magnitude, and quotients by it. One definition for all that casts.
//
// kIsOrdinary: without infinities, and not of the very smallest numbers. What casts such numbers fast finds out if they are
// not. Then the same numbers are cast again, in a way that is right for any.
#pragma once
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr float kLargest = 448.f;                 // of E4M3
constexpr float kLeastScale = 1.1754943508e-38f;  // 2^-126, the smallest normal number

// A scale, and -1 over it; over its significand, which lies in [1, 2), if blocks are not ordinary.
struct Divisor {
  float scale, reciprocal;
};

DEVICE float significand_of(float scale) { return ptx::float_of((ptx::bits_of(scale) & 0x7fffff) | 0x3f800000); }

// The scale of elements whose largest magnitude is `amax`, which becomes `largest`; it counts as at least `min_amax`.
DEVICE float scale_of(float amax, float min_amax, bool rounds_up, float largest = kLargest) {
  amax = amax < min_amax ? min_amax : amax;
  // amax / largest as a division rounds it, whatever amax is, but for numbers below kLeastScale.
  const float guess = amax * (1.f / largest);
  const float quotient = ptx::fma_rn(ptx::fma_rn(guess, -largest, amax), 1.f / largest, guess);
  const float least = quotient < kLeastScale ? kLeastScale : quotient;
  // Up to a power of two: a carry out of the mantissa is the next one.
  const float power = ptx::float_of((ptx::bits_of(least) + 0x7fffff) & 0x7f800000);
  return amax == 0.f ? 1.f : rounds_up ? power : least;
}

// 1 / scale as a division rounds it, where neither is so small or large that a step underflows.
DEVICE float reciprocal_of(float scale) {
  const float guess = ptx::rcp_approx(scale);
  return ptx::fma_rn(ptx::fma_rn(guess, -scale, 1.f), guess, guess);
}

template <bool kIsOrdinary>
DEVICE Divisor divisor_of(float amax, float min_amax, bool rounds_up, float largest = kLargest) {
  const float scale = scale_of(amax, min_amax, rounds_up, largest);
  return {scale, -reciprocal_of(kIsOrdinary ? scale : significand_of(scale))};
}

// Whether ordinary quotients by this scale are right. That of an infinity is NaN, or zero as a power of two.
DEVICE bool is_ordinary(Divisor d) { return d.scale >= 0x1p-90f; }

// x / scale as a division rounds it, for |x| <= 448 * scale (in FP4 6 * scale, whose ties are among those of FP8), zeros with
// their signs, and NaN, which an infinity becomes. `guess` is off by two units in the last place at most, and `excess` is
// exact; one step from there gives the rounded quotient wherever FP8 rounds differently on its two sides. (The test of hard
// quotients has all that are near.) `excess` may underflow if the scale is tiny: so in general numbers are multiplied by a
// power of two that makes the scale a significand. Then nothing underflows that FP8 can tell from zero.
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
