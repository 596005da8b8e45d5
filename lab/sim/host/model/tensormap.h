// Tensor maps that kernels write. TMA sees a change once the writer has released it and the user has acquired it. No thread
// may write a map while a copy uses it. The map itself records the release, because a later kernel may use it.
#pragma once
#include "global_memory.h"

namespace sim {

using ptx::TensorMap;

inline bool is_in_global_memory(const TensorMap* map) {
  return find_buffer(reinterpret_cast<uint64_t>(map), sizeof(TensorMap)) != nullptr;
}

// Checks a map that this thread uses: a parameter of the kernel, or one that a kernel made.
inline void check_use_of_map(const TensorMap* map, const char* what) {
  if (is_in_global_memory(map)) {
    const auto address = reinterpret_cast<uint64_t>(map);
    check_global(address, sizeof(TensorMap), false, self->cta, what);
    if (!self->acquired_maps.count(map))
      fail(std::string(what) + " uses a tensor map that a kernel made, " + describe_address(address) +
           ", without fence_tensormap_acquire");
  }
  if (map->magic != TensorMap::kMagic) fail(std::string(what) + ": this is not a tensor map");
}

inline TensorMap& map_to_write(TensorMap* map, const char* what) {
  yield();
  const auto address = reinterpret_cast<uint64_t>(map);
  if (address % alignof(TensorMap)) fail(std::string(what) + ": a tensor map lies at a multiple of 64 bytes");
  check_global(address, sizeof(TensorMap), true, self->cta, what);
  if (machine->maps_in_use[map])
    fail(std::string(what) + " writes a tensor map that a copy in flight is using: " + describe_address(address));
  for (Fiber& fiber : machine->fibers) fiber.acquired_maps.erase(map);
  self->unreleased_maps.push_back(map);
  return *map;
}

inline TensorMap& map_to_edit(TensorMap* map, const char* what) {
  TensorMap& edited = map_to_write(map, what);
  if (edited.magic != TensorMap::kMagic) fail(std::string(what) + ": this is not a tensor map");
  edited.is_unreleased = 1;
  return edited;
}

void tensormap_replace_size(TensorMap* map, uint32_t dimension, uint32_t size) {
  TensorMap& edited = map_to_edit(map, "tensormap_replace_size");
  if (dimension >= edited.rank || size == 0) fail("tensormap_replace_size: " + text(size) + " is no size of a dimension");
  edited.dims[dimension] = size;
}

void tensormap_replace_stride(TensorMap* map, uint32_t dimension, uint64_t bytes) {
  TensorMap& edited = map_to_edit(map, "tensormap_replace_stride");
  if (dimension >= edited.rank || bytes == 0 || bytes % 16)
    fail("tensormap_replace_stride: " + text(bytes) + " bytes are no stride of a dimension; it takes multiples of 16");
  edited.strides[dimension - 1] = bytes;
}

}  // namespace sim

namespace ptx {

void tensormap_copy(TensorMap* to, const TensorMap& from) {
  TensorMap& copy = map_to_write(to, "tensormap_copy");
  copy = from;
  copy.is_unreleased = 1;
}

void tensormap_replace_address(TensorMap* map, const void* address) {
  TensorMap& edited = map_to_edit(map, "tensormap_replace_address");
  edited.base = reinterpret_cast<uint64_t>(address);
  if (edited.base % 16) fail("tensormap_replace_address: the address is not a multiple of 16");
}

void fence_tensormap_release() {
  yield();
  for (const void* map : self->unreleased_maps) static_cast<TensorMap*>(const_cast<void*>(map))->is_unreleased = 0;
  self->unreleased_maps.clear();
}

void fence_tensormap_acquire(const TensorMap* map) {
  yield();
  const auto address = reinterpret_cast<uint64_t>(map);
  check_global(address, sizeof(TensorMap), false, self->cta, "fence_tensormap_acquire");
  if (map->is_unreleased)
    fail("fence_tensormap_acquire: " + describe_address(address) +
         " was written, and fence_tensormap_release has not shown it to TMA");
  self->acquired_maps.insert(map);
}

}  // namespace ptx
