// Who a thread is, and what it does together with its warp or block.
#pragma once
#include "types.cuh"

namespace ptx {

DEVICE uint32_t thread_index() { return threadIdx.x; }
DEVICE uint32_t lane_index() { return threadIdx.x % 32; }
DEVICE uint32_t block_index() { return blockIdx.x; }
DEVICE uint32_t grid_size() { return gridDim.x; }

DEVICE uint32_t shfl_sync(uint32_t value, uint32_t lane) { return __shfl_sync(0xffffffff, value, lane); }
DEVICE float shfl_sync(float value, uint32_t lane) { return __shfl_sync(0xffffffff, value, lane); }

// The same in all threads of a warp, which the shuffle tells the compiler.
DEVICE uint32_t warp_index() { return shfl_sync(threadIdx.x / 32, 0); }

DEVICE bool all_sync(bool condition) { return __all_sync(0xffffffff, condition); }

// True in one lane of the warp.
DEVICE bool elect_sync() {
  uint32_t elected;
  asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\nselp.b32 %0, 1, 0, elected;\n}"
               : "=r"(elected));
  return elected != 0;
}

DEVICE void syncthreads() { __syncthreads(); }

// A barrier of `threads` threads of the block, by number; 0 is that of syncthreads.
DEVICE void bar_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace ptx
