// Casts a gated activation, times the row's weight. The first half of a row of x is gate, the second half is up.
//
// Each product is rounded to FP32, in the order of this code.
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

template <typename Gating>
DEVICE Held activated(const CastParams& p, const Loaded& loaded) {
  const Gating gating(p);
  Held held;
#pragma unroll
  for (uint32_t e = 0; e < kElements; ++e)
    held.words[e] = ptx::bits_of(gating(element_of(loaded.gate, e), element_of(loaded.up, e), loaded.weight));
  return held;
}

DEVICE Held held_of(const CastParams& p, const Loaded& loaded) {
  if (p.gating == 0) return activated<Plain>(p, loaded);
  return p.gating == 1 ? activated<Swiglu>(p, loaded) : activated<Situ>(p, loaded);
}
