// The simulator's counterpart of core/ptx/platform.cuh. Each file in this folder declares the functions that the file of the
// same name in core/ptx defines with asm; ../model defines their bodies.
#pragma once
#include <stdint.h>

#define DEVICE inline
#define DEVICE_CONSTEXPR constexpr
#define GRID_CONSTANT const
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)
#define SIM_JOIN_(a, b) a##b
#define SIM_JOIN(a, b) SIM_JOIN_(a, b)
#define KERNEL(threads, min_blocks)                                                             \
  static const sim::LaunchBounds SIM_JOIN(sim_launch_bounds_, __LINE__)((threads), (min_blocks)); \
  extern "C" void

// The simulator has no CUDA release: kernels use their code for the newest one.
constexpr uint32_t kCudaRelease = ~0u;

namespace sim {

// Records the kernel's bounds, so that each launch is checked against them.
struct LaunchBounds {
  LaunchBounds(uint32_t threads, uint32_t min_blocks);
};

uint8_t* dynamic_shared_memory(uint64_t bytes_needed);

}  // namespace sim

namespace ptx {

struct Uint2 {
  uint32_t x, y;
};
struct Uint4 {
  uint32_t x, y, z, w;
};
struct Float2 {
  float x, y;
};
struct Float4 {
  float x, y, z, w;
};

template <typename T>
T& dynamic_shared() {
  return *reinterpret_cast<T*>(sim::dynamic_shared_memory(sizeof(T)));
}

uint32_t smem_address(const void* pointer);
inline uint32_t opaque(uint32_t value) { return value; }

}  // namespace ptx
