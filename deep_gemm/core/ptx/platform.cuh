// Types, macros and shared memory of kernels, so that NVRTC and the simulator's g++ can both compile a kernel.
// The simulator replaces the files of this folder by files of the same names, and no other file of a kernel.
#pragma once

// NVRTC has no <cstdint> unless CUDA's headers are installed, and kernels need no other header of CUDA.
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
static_assert(sizeof(uint32_t) == 4 && sizeof(uint64_t) == 8, "fixed-width types");

#define DEVICE __device__ __forceinline__
#define DEVICE_CONSTEXPR __device__ constexpr
// A kernel with CTAs of at most `threads` threads, and `min_blocks` CTAs on an SM: KERNEL(384, 1) name(...) {...}
#define KERNEL(threads, min_blocks) extern "C" __global__ void __launch_bounds__(threads, min_blocks)
// Keeps a parameter in constant memory, so that code may use its address, as tensor maps need.
#define GRID_CONSTANT const __grid_constant__
// The offset of a member in its struct, as a constant expression. NVRTC has this built-in for `offsetof` of <cstddef>.
#define OFFSET_OF(type, member) __INTADDR__(&((type*)0)->member)

// NVRTC's CUDA release: 1208 is 12.8.
constexpr uint32_t kCudaRelease = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__;

// The swizzled layouts of TMA and WGMMA repeat every 1024 bytes.
extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];

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

// The 32-bit address in the shared window, which the instructions in this folder need.
DEVICE uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Hides from the compiler how a value was computed, so the compiler cannot compute it again.
DEVICE uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The CTA's dynamic shared memory, as a T. A shuffle hides the address from the compiler, so the compiler keeps it in a
// register, as a value that all lanes share. If the compiler knew the address, it would compute it again for each use
// from the CTA's rank, and reading the rank takes tens of cycles.
template <typename T>
DEVICE T& dynamic_shared() {
  uint64_t address;
  asm volatile(
      "{\n"
      ".reg .b32 start;\n"
      "shfl.sync.idx.b32 start, %1, 0, 31, 0xffffffff;\n"
      "cvt.u64.u32 %0, start;\n"
      "cvta.shared.u64 %0, %0;\n"
      "}"
      : "=l"(address)
      : "r"(smem_address(dynamic_shared_memory)));
  return *reinterpret_cast<T*>(address);
}

}  // namespace ptx
