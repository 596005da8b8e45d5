#pragma once
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

namespace sim {
void tensormap_replace_size(ptx::TensorMap* map, uint32_t dimension, uint32_t size);
void tensormap_replace_stride(ptx::TensorMap* map, uint32_t dimension, uint64_t bytes);
}  // namespace sim

namespace ptx {

void tensormap_copy(TensorMap* to, const TensorMap& from);
void tensormap_replace_address(TensorMap* map, const void* address);
template <uint32_t kDimension>
void tensormap_replace_size(TensorMap* map, uint32_t size) {
  sim::tensormap_replace_size(map, kDimension, size);
}
template <uint32_t kDimension>
void tensormap_replace_stride(TensorMap* map, uint64_t bytes) {
  static_assert(kDimension >= 1, "the innermost dimension has no stride");
  sim::tensormap_replace_stride(map, kDimension, bytes);
}
void fence_tensormap_release();
void fence_tensormap_acquire(const TensorMap* map);

}  // namespace ptx
