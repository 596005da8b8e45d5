// Indices of a thread, and operations that the threads of a warp, a warpgroup or a CTA do together.
//
// All threads of a warp must execute an "aligned" operation together.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// ---- Indices: CTAs and grids of this package have one dimension.

DEVICE uint32_t thread_index() { return threadIdx.x; }
DEVICE uint32_t lane_index() { return threadIdx.x % 32; }
DEVICE uint32_t block_index() { return blockIdx.x; }
DEVICE uint32_t grid_size() { return gridDim.x; }

// ---- Warp: all 32 threads take part.

// Returns true in one thread of the warp, the same thread each time. (PTX ISA, "elect.sync".)
DEVICE bool elect_sync() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// Returns the value of lane `source` (modulo 32). The compiler knows that the result is uniform only if `source` is.
DEVICE uint32_t shfl_sync(uint32_t value, uint32_t source) { return __shfl_sync(0xffffffffu, value, source); }
DEVICE float shfl_sync(float value, uint32_t source) { return __shfl_sync(0xffffffffu, value, source); }
// Returns the value of the lane whose number differs from this lane's in these bits.
DEVICE float shfl_xor_sync(float value, uint32_t bits) { return __shfl_xor_sync(0xffffffffu, value, bits); }
// The warp's index in the CTA. The shuffle tells the compiler that it is equal in all threads of the warp.
DEVICE uint32_t warp_index() { return shfl_sync(threadIdx.x / 32, 0); }
DEVICE bool all_sync(bool value) { return __all_sync(0xffffffffu, value); }
// Bit i of the result is the value of lane i.
DEVICE uint32_t ballot_sync(bool value) { return __ballot_sync(0xffffffffu, value); }
DEVICE uint32_t reduce_min_sync(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }
// Bit i of the result is set if lane i has the same value as this lane.
DEVICE uint32_t match_any_sync(uint32_t value) { return __match_any_sync(0xffffffffu, value); }
DEVICE void syncwarp() { __syncwarp(); }

DEVICE uint32_t popc(uint32_t bits) { return __popc(bits); }

// ---- CTA

DEVICE void syncthreads() { __syncthreads(); }
// Tells whether `value` is true in all threads of the CTA.
DEVICE bool syncthreads_and(bool value) { return __syncthreads_and(value); }

// Waits at a named barrier, 1 to 15 (syncthreads uses 0). `threads`, a multiple of 32, must arrive. (PTX ISA,
// "bar, barrier".)
DEVICE void bar_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at a named barrier and does not wait.
DEVICE void bar_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Grid: a kernel may start before the previous kernel has ended. (PTX ISA, "griddepcontrol".)

// Waits until the previous kernel has ended and its writes are visible. Does nothing if the launch has no early start.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Move registers between the warpgroups of a CTA. (PTX ISA, "setmaxnreg".) All warps of a warpgroup execute it. An increase
// waits until decreases have freed enough registers. It waits for ever if the sum of (threads x registers) would exceed
// the CTA's registers at launch.
template <uint32_t kRegisters>
DEVICE void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
DEVICE void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Products of a warp's registers. (PTX ISA, "Warp-level matrix instructions", "Matrix Fragments for mma.m16n8k8".)
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
