// silu(gate), as an FP32 product of gate and its sigmoid. Two instructions compute sigmoid(gate), within 2^-20 of it
// for gates from -10 on. A sigmoid below 2^-126 becomes zero. `alpha` steepens the sigmoid.
#pragma once
#include "ptx/memory.cuh"

constexpr float kLog2OfE = 1.44269504f;

DEVICE float sigmoid(float gate, float alpha) { return ptx::rcp_approx(1.f + ptx::ex2_approx(gate * (-kLog2OfE * alpha))); }
DEVICE float silu(float gate, float alpha = 1.f) { return ptx::mul_rn(gate, sigmoid(gate, alpha)); }

// tanh for SiTU, which bounds a number by bound * tanh(x / bound).
//
// The relative error is at most 2^-19. Near zero, 1 - fraction would cancel, so the code adds terms of the series.
DEVICE float tanh_of(float x) {
  constexpr float kTwoLog2OfE = 2.88539008f;
  const float square = x * x, magnitude = ptx::abs_f32(x);
  const float small = x * (1.f + square * (-1.f / 3 + square * (2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835)))));
  const float large = 1.f - 2.f * ptx::rcp_approx(1.f + ptx::ex2_approx(magnitude * kTwoLog2OfE));
  const float with_sign = ptx::float_of(ptx::bits_of(large) | (ptx::bits_of(x) & 0x80000000));
  return magnitude < 0.25f ? small : with_sign;
}

DEVICE float bounded(float x, float bound, float reciprocal) { return ptx::mul_rn(bound, tanh_of(x * reciprocal)); }

// silu(gate) * up, without a weight and without parameters.
struct Plain {
  DEVICE explicit Plain(const auto&) {}
  DEVICE float operator()(float gate, float up, float) const { return ptx::mul_rn(silu(gate), up); }
};

struct Swiglu {
  float limit, alpha, beta;
  DEVICE explicit Swiglu(const auto& p) : limit(p.limit), alpha(p.alpha), beta(p.beta) {}
  DEVICE float operator()(float gate, float up, float weight) const {
    gate = ptx::min_nan(gate, limit), up = ptx::min_magnitude(up, limit) + beta;
    return ptx::mul_rn(ptx::mul_rn(silu(gate, alpha), up), weight);
  }
};

struct Situ {
  float alpha, beta, alpha_reciprocal, beta_reciprocal;
  DEVICE explicit Situ(const auto& p)
      : alpha(p.alpha), beta(p.beta), alpha_reciprocal(p.alpha_reciprocal), beta_reciprocal(p.beta_reciprocal) {}
  DEVICE float operator()(float gate, float up, float weight) const {
    const float of_gate = ptx::mul_rn(bounded(gate, alpha, alpha_reciprocal), sigmoid(gate, 1.f));
    return ptx::mul_rn(ptx::mul_rn(of_gate, bounded(up, beta, beta_reciprocal)), weight);
  }
};
