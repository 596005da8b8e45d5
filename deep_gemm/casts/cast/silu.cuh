// silu(gate), rounded to FP32 once more than its sigmoid. Two instructions give sigmoid(gate) within 2^-20 of it for gates from
// -10 on; below 2^-126 it is zero.
#pragma once
#include "ptx/memory.cuh"

DEVICE float silu(float gate) {
  constexpr float kLog2OfE = 1.44269504f;
  return ptx::mul_rn(gate, ptx::rcp_approx(1.f + ptx::ex2_approx(gate * -kLog2OfE)));
}
