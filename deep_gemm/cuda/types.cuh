// Types and keywords that every source uses; NVRTC compiles them without any header of CUDA or the C library.
#pragma once

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;

#define DEVICE __device__ __forceinline__
#define DEVICE_CONSTEXPR __device__ constexpr
#define KERNEL(threads, blocks_per_sm) extern "C" __global__ void __launch_bounds__(threads, blocks_per_sm)
#define GRID_CONSTANT const __grid_constant__

DEVICE_CONSTEXPR uint32_t ceil_div(uint32_t x, uint32_t y) { return (x + y - 1) / y; }

DEVICE_CONSTEXPR uint32_t greatest_common_divisor(uint32_t x, uint32_t y) {
  return y == 0 ? x : greatest_common_divisor(y, x % y);
}
