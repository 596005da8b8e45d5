// s = silu(gate) * up, with gate and up clamped by a limit, and the derivatives of s with respect to gate and up.
// Each product is rounded to FP32, in the order of this code.
#pragma once
#include "cast/silu.cuh"
#include "cast/values.cuh"

struct Silu {
  float s, by_gate, by_up;
};

DEVICE Silu silu_of(float gate, float up, float limit) {
  const float cut_gate = ptx::min_nan(gate, limit), cut_up = ptx::min_magnitude(up, limit);
  const float steepness = sigmoid(cut_gate, 1.f), silu = ptx::mul_rn(cut_gate, steepness), more = 1.f + cut_gate - silu;
  const float slope = ptx::mul_rn(ptx::mul_rn(cut_up, steepness), more);
  return {ptx::mul_rn(silu, cut_up), gate > limit ? 0.f : slope, ptx::abs_f32(up) > limit ? 0.f : silu};
}

// Replaces gate and up by their gradients, and ds by s (times the row's weight if kWeighted). Returns the sum of s * ds
// over the lane's elements.
template <bool kWeighted>
DEVICE float compute_row(float limit, float weight, Piece& gate, Piece& up, Piece& ds) {
  float sum = 0.f;
#pragma unroll
  for (uint32_t word = 0; word < kWords; ++word) {
    float by_gate[2], by_up[2], s[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t e = word * 2 + j;
      const Silu silu = silu_of(element_of(gate, e), element_of(up, e), limit);
      const float of_s = element_of(ds, e), weighted = ptx::mul_rn(of_s, weight);
      s[j] = silu.s, sum += ptx::mul_rn(silu.s, of_s);
      by_gate[j] = ptx::mul_rn(weighted, silu.by_gate), by_up[j] = ptx::mul_rn(weighted, silu.by_up);
    }
    gate.words[word] = ptx::pack_bf16(by_gate[0], by_gate[1]);
    up.words[word] = ptx::pack_bf16(by_up[0], by_up[1]);
    if constexpr (kWeighted) s[0] = ptx::mul_rn(s[0], weight), s[1] = ptx::mul_rn(s[1], weight);
    ds.words[word] = ptx::pack_bf16(s[0], s[1]);
  }
  return sum;
}
