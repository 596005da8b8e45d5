// s = silu(gate) * up, gate and up cut at a limit, and its derivatives by both. Each product is rounded to FP32, in the order in
// which it is written.
#pragma once
#include "cast/silu.cuh"

struct Silu {
  float s, by_gate, by_up;
};

DEVICE Silu silu_of(float gate, float up, float limit) {
  const float cut_gate = ptx::min_nan(gate, limit), cut_up = ptx::min_magnitude(up, limit);
  const float steepness = sigmoid(cut_gate, 1.f), silu = ptx::mul_rn(cut_gate, steepness), more = 1.f + cut_gate - silu;
  const float slope = ptx::mul_rn(ptx::mul_rn(cut_up, steepness), more);
  return {ptx::mul_rn(silu, cut_up), gate > limit ? 0.f : slope, ptx::abs_f32(up) > limit ? 0.f : silu};
}
