// What is cast is a gated activation, times the row's weight: gate is the first half of a row of x, up the other one.
//
// Each product is rounded to FP32, in the order in which it is written.
#pragma once
#include "cast/silu.cuh"

// The bounds of SiTU: bound * tanh(x / bound).
//
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
