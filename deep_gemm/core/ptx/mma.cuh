// Products of a warp's registers: mma.sync. (PTX ISA, "Warp-level matrix instructions", "Matrix Fragments for mma.m16n8k8".)
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// D += A @ B.T for 16 rows of A and 8 rows of B, 8 deep, in TF32: the lower 13 bits of an operand are ignored. A lane,
// with g = lane / 4 and t = lane % 4, has A[g][t], A[g + 8][t], A[g][t + 4], A[g + 8][t + 4]; B[g][t], B[g][t + 4]; and
// D[g][2 t], D[g][2 t + 1], D[g + 8][2 t], D[g + 8][2 t + 1].
DEVICE void mma_m16n8k8_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

}  // namespace ptx
