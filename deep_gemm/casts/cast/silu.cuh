// silu(gate), rounded to FP32 once more than its sigmoid. Two instructions give sigmoid(gate) within 2^-20 of it for gates from
// -10 on; below 2^-126 it is zero. `alpha` makes the sigmoid steeper.
#pragma once
#include "ptx/memory.cuh"

constexpr float kLog2OfE = 1.44269504f;

DEVICE float sigmoid(float gate, float alpha) { return ptx::rcp_approx(1.f + ptx::ex2_approx(gate * (-kLog2OfE * alpha))); }
DEVICE float silu(float gate, float alpha = 1.f) { return ptx::mul_rn(gate, sigmoid(gate, alpha)); }
