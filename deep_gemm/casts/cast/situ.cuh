// The bounds of SiTU: bound * tanh(x / bound).
#pragma once
#include "ptx/memory.cuh"

// Within 2^-19 of itself. Near zero the fraction would lose what tanh has left, so there it is the first terms of its series.
DEVICE float tanh_of(float x) {
  constexpr float kTwoLog2OfE = 2.88539008f;
  const float square = x * x, magnitude = ptx::abs_f32(x);
  const float small = x * (1.f + square * (-1.f / 3 + square * (2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835)))));
  const float large = 1.f - 2.f * ptx::rcp_approx(1.f + ptx::ex2_approx(magnitude * kTwoLog2OfE));
  const float with_sign = ptx::float_of(ptx::bits_of(large) | (ptx::bits_of(x) & 0x80000000));
  return magnitude < 0.25f ? small : with_sign;
}

DEVICE float bounded(float x, float bound, float reciprocal) { return ptx::mul_rn(bound, tanh_of(x * reciprocal)); }
