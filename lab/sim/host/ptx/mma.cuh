#pragma once
#include "ptx/platform.cuh"

namespace ptx {

void mma_m16n8k8_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);

}  // namespace ptx
