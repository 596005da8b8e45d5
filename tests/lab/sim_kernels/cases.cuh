// Arguments of the unit kernels in the simulator's tests. A unit kernel is a CASE(name) {...}; one kernel holds many.
#pragma once
#include "types.cuh"

#include <cstring>

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tensormap.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"

struct Shared {
  alignas(1024) uint8_t tile[16384];
  alignas(1024) uint8_t other[16384];
  float floats[1024];
  uint64_t bar[4];
};

struct Case {
  const ptx::TensorMap &map_in, &map_out;
  const float* in;
  float* out;
  uint32_t* flags;
  uint32_t x;
};

// No kernel of the package stores a single FP32, so `ptx/` has no wrapper for it.
DEVICE void write_f32(float* pointer, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  ptx::st_global_b32(pointer, bits);
}

DEVICE void init_barrier(uint64_t* bar, uint32_t thread) {
  if (thread == 0) {
    ptx::mbarrier_init(bar, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
}

#define CASE(name) \
  inline void name(Case& c, Shared& shared, uint64_t* bar, uint32_t thread, uint32_t warp, uint32_t lane)
// A case whose first mbarrier the kernel initializes, for one arrival, before the case begins.
#define BARRIER_CASE(name) CASE(name)
