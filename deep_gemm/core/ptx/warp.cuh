// Indices of a thread, and operations that the threads of a warp or of a block do together.
//
// "Aligned" operations must be reached by all threads of the warp together.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// ---- Indices: blocks and grids of this package have one dimension.

DEVICE uint32_t thread_index() { return threadIdx.x; }
DEVICE uint32_t lane_index() { return threadIdx.x % 32; }
DEVICE uint32_t block_index() { return blockIdx.x; }
DEVICE uint32_t grid_size() { return gridDim.x; }

// ---- Warp: all 32 threads take part.

// True in one thread of the warp, the same one each time. (PTX ISA, "elect.sync".)
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

// The value that lane `source` (modulo 32) passes. To the compiler it is uniform only where `source` is.
DEVICE uint32_t shfl_sync(uint32_t value, uint32_t source) { return __shfl_sync(0xffffffffu, value, source); }
DEVICE float shfl_sync(float value, uint32_t source) { return __shfl_sync(0xffffffffu, value, source); }
// The value passed by the lane whose number differs in these bits.
DEVICE float shfl_xor_sync(float value, uint32_t bits) { return __shfl_xor_sync(0xffffffffu, value, bits); }
// The same in all threads of a warp, which the shuffle tells the compiler.
DEVICE uint32_t warp_index() { return shfl_sync(threadIdx.x / 32, 0); }
DEVICE bool all_sync(bool value) { return __all_sync(0xffffffffu, value); }
// Bit i is what lane i passes.
DEVICE uint32_t ballot_sync(bool value) { return __ballot_sync(0xffffffffu, value); }
DEVICE uint32_t reduce_min_sync(uint32_t value) { return __reduce_min_sync(0xffffffffu, value); }
// Bit i is set if lane i passes the same value as this one.
DEVICE uint32_t match_any_sync(uint32_t value) { return __match_any_sync(0xffffffffu, value); }
DEVICE void syncwarp() { __syncwarp(); }

// How many bits are set.
DEVICE uint32_t popc(uint32_t bits) { return __popc(bits); }

// ---- Block

DEVICE void syncthreads() { __syncthreads(); }
// Tells whether all threads of the block pass true.
DEVICE bool syncthreads_and(bool value) { return __syncthreads_and(value); }

// Named barriers 1 to 15 (syncthreads uses 0), for a number of threads that is a multiple of 32.
// (PTX ISA, "bar, barrier".)
DEVICE void bar_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at such a barrier for others to go on, and does not wait.
DEVICE void bar_arrive(uint32_t id, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Grid: a kernel may start while the one before it ends. (PTX ISA, "griddepcontrol".)

// Waits until the kernel before has ended and its writes can be read. Does nothing unless launched to start early.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace ptx
