// Tensor maps that a kernel makes in global memory from a map that the driver has encoded. (PTX ISA,
// "tensormap.replace", and "fence.proxy.tensormap" under "membar, fence".)
//
// TMA reads maps through a proxy of its own. A thread that has written a map executes `fence_tensormap_release`. A
// thread that uses the map first synchronizes with the writer, and then executes `fence_tensormap_acquire` on the map.
// No thread may write a map while a copy that uses it may be in flight.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace ptx {

// `to` must be in global memory. `from` may be anywhere, for example in a kernel's parameters.
DEVICE void tensormap_copy(TensorMap* to, const TensorMap& from) {
#pragma unroll
  for (uint32_t i = 0; i < 16; i += 2)
    st_global_v4_b32(&to->opaque[i], static_cast<uint32_t>(from.opaque[i]), static_cast<uint32_t>(from.opaque[i] >> 32),
                     static_cast<uint32_t>(from.opaque[i + 1]), static_cast<uint32_t>(from.opaque[i + 1] >> 32));
}

// Sets the address of the tensor's first element, which must be a multiple of 16 bytes.
DEVICE void tensormap_replace_address(TensorMap* map, const void* address) {
  asm volatile("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;" ::"l"(map), "l"(address) : "memory");
}
// Sets the elements of a dimension, at least 1. Dimension 0 is the innermost.
template <uint32_t kDimension>
DEVICE void tensormap_replace_size(TensorMap* map, uint32_t size) {
  asm volatile("tensormap.replace.tile.global_dim.global.b1024.b32 [%0], %1, %2;" ::"l"(map), "n"(kDimension), "r"(size)
               : "memory");
}
// Sets the stride of dimension kDimension, which is at least 1: the bytes from an element to the next, a multiple of
// 16. Stride 0 of the instruction is dimension 1's. (Before CUDA 12.5, the instruction expected strides divided by 16.)
template <uint32_t kDimension>
DEVICE void tensormap_replace_stride(TensorMap* map, uint64_t bytes) {
  static_assert(kDimension >= 1, "the innermost dimension has no stride");
  asm volatile("tensormap.replace.tile.global_stride.global.b1024.b64 [%0], %1, %2;" ::"l"(map), "n"(kDimension - 1),
               "l"(bytes)
               : "memory");
}

// Releases all maps that this thread has written.
DEVICE void fence_tensormap_release() { asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory"); }
DEVICE void fence_tensormap_acquire(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

}  // namespace ptx
