// What is cast is a gated activation, times the row's weight: gate is the first half of a row of x, up the other one.
//
// Each product is rounded to FP32, in the order in which it is written.
#pragma once
#include "cast/silu.cuh"
#include "cast/situ.cuh"

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

// silu(gate) * up, without weights: what a model has nothing to say about.
struct Plain {
  DEVICE explicit Plain(const CastParams&) {}
  DEVICE float operator()(float gate, float up, float) const { return ptx::mul_rn(silu(gate), up); }
};

struct Swiglu {
  float limit, alpha, beta;
  DEVICE explicit Swiglu(const CastParams& p) : limit(p.limit), alpha(p.alpha), beta(p.beta) {}
  DEVICE float operator()(float gate, float up, float weight) const {
    gate = ptx::min_nan(gate, limit), up = ptx::min_magnitude(up, limit) + beta;
    return ptx::mul_rn(ptx::mul_rn(silu(gate, alpha), up), weight);
  }
};

struct Situ {
  float alpha, beta, alpha_reciprocal, beta_reciprocal;
  DEVICE explicit Situ(const CastParams& p)
      : alpha(p.alpha), beta(p.beta), alpha_reciprocal(p.alpha_reciprocal), beta_reciprocal(p.beta_reciprocal) {}
  DEVICE float operator()(float gate, float up, float weight) const {
    const float of_gate = ptx::mul_rn(bounded(gate, alpha, alpha_reciprocal), sigmoid(gate, 1.f));
    return ptx::mul_rn(ptx::mul_rn(of_gate, bounded(up, beta, beta_reciprocal)), weight);
  }
};

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
