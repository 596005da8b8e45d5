// What is cast is silu(gate) * up, times the row's weight: gate is the first half of a row of x, up the other one.
//
// Each product is rounded to FP32, in this order.
#pragma once
#include "cast/silu.cuh"

struct Loaded {
  Piece gate, up;
  float weight;
};
using Held = Computed;

DEVICE Loaded load(const CastParams& p, uint32_t row, bool is_there, uint32_t block, uint32_t lane) {
  const uint8_t* gate = p.x + uint64_t{row} * p.x_pitch;
  Loaded loaded;
  loaded.gate = load_piece(gate, is_there, block * kBlock, p.k, lane);
  loaded.up = load_piece(gate + uint64_t{p.k} * kInputBytes, is_there, block * kBlock, p.k, lane);
  loaded.weight = p.row_weights != nullptr && is_there ? ptx::ld_global_f32(p.row_weights + row) : 1.f;
  return loaded;
}

// kIsPlain: without a limit and weights.
template <bool kIsPlain>
DEVICE Held activated(const Loaded& loaded, float limit) {
  Held held;
#pragma unroll
  for (uint32_t e = 0; e < kElements; ++e) {
    float gate = element_of(loaded.gate, e), up = element_of(loaded.up, e);
    if constexpr (!kIsPlain) gate = ptx::min_nan(gate, limit), up = ptx::min_magnitude(up, limit);
    const float product = ptx::mul_rn(silu(gate), up);
    held.words[e] = ptx::bits_of(kIsPlain ? product : ptx::mul_rn(product, loaded.weight));
  }
  return held;
}

DEVICE Held held_of(const CastParams& p, const Loaded& loaded) {
  return p.is_plain ? activated<true>(loaded, 0.f) : activated<false>(loaded, p.limit);
}
