// Shared memory in two views. Ordinary loads and stores act on the generic view; TMA and WGMMA act on the async view.
// A thread's writes reach the async view at its fence.proxy.async. Data from TMA reaches the generic view when a thread
// has waited for its mbarrier. Memory that was never written, or that a load in flight will write, is poison: all bits
// are one, which is a NaN in E4M3, BF16 and FP32.
#pragma once
#include "scheduler.h"

namespace sim {

constexpr uint8_t kPoison = 0xff;

inline uint32_t shared_offset(const void* pointer, uint32_t bytes, uint32_t alignment, const char* what) {
  const auto offset = reinterpret_cast<intptr_t>(pointer) - reinterpret_cast<intptr_t>(self->cta->generic);
  if (offset < 0 || offset + static_cast<int64_t>(bytes) > static_cast<int64_t>(machine->launch.shared_bytes))
    fail(std::string(what) + ": shared-memory offset " + std::to_string(offset) + " (" + text(bytes) +
         " bytes) lies outside the block's " + text(machine->launch.shared_bytes) + " bytes");
  if (offset % alignment)
    fail(std::string(what) + ": shared-memory offset " + std::to_string(offset) + " is not a multiple of " +
         text(alignment));
  return static_cast<uint32_t>(offset);
}

// Returns the pointer for an address from smem_address. The access itself checks that it is in the block's memory.
inline const uint8_t* shared_pointer(uint32_t address) {
  return self->cta->generic + (static_cast<int64_t>(address & 0xffffff) - kSharedBase);
}

inline void shared_store(uint32_t offset, const void* source, uint32_t bytes) {
  std::memcpy(self->cta->generic + offset, source, bytes);
  std::memset(self->cta->async + offset, kPoison, bytes);  // until the fence, TMA may read neither old nor new bytes
  self->unfenced.push_back({offset, bytes});
}

template <typename T>
T shared_load(const void* pointer, const char* what) {
  yield();
  T value;
  std::memcpy(&value, self->cta->generic + shared_offset(pointer, sizeof(T), sizeof(T), what), sizeof(T));
  return value;
}

template <typename T>
void shared_store_value(void* pointer, const T& value, const char* what) {
  yield();
  shared_store(shared_offset(pointer, sizeof(T), sizeof(T), what), &value, sizeof(T));
}

// PTX ISA, "Swizzling Modes": XOR address bits 4 and up with bits 7 and up, for the bits that index the span's chunks.
inline uint32_t swizzle(uint32_t address, uint32_t span_bytes) {
  return span_bytes ? address ^ (address >> 3 & (span_bytes - 16)) : address;
}

inline void poison(Cta* cta, Range range) {
  std::memset(cta->generic + range.offset, kPoison, range.bytes);
  std::memset(cta->async + range.offset, kPoison, range.bytes);
}

}  // namespace sim

namespace ptx {

float ld_shared_f32(const void* p) { return shared_load<float>(p, "ld_shared_f32"); }
float ld_shared_f32(uint32_t address) { return ld_shared_f32(shared_pointer(address)); }
Float2 ld_shared_v2_f32(const void* p) { return shared_load<Float2>(p, "ld_shared_v2_f32"); }
Float2 ld_shared_v2_f32(uint32_t address) { return ld_shared_v2_f32(shared_pointer(address)); }
Float4 ld_shared_v4_f32(const void* p) { return shared_load<Float4>(p, "ld_shared_v4_f32"); }
Float4 ld_shared_v4_f32(uint32_t address) { return ld_shared_v4_f32(shared_pointer(address)); }
uint32_t ld_shared_b32(const void* p) { return shared_load<uint32_t>(p, "ld_shared_b32"); }
uint32_t ld_shared_u16(uint32_t address) { return shared_load<uint16_t>(shared_pointer(address), "ld_shared_u16"); }
Uint2 ld_shared_v2_b32(const void* p) { return shared_load<Uint2>(p, "ld_shared_v2_b32"); }
Uint4 ld_shared_v4_b32(const void* p) { return shared_load<Uint4>(p, "ld_shared_v4_b32"); }
Uint4 ld_shared_v4_b32(uint32_t address) { return ld_shared_v4_b32(shared_pointer(address)); }
void st_shared_b32(void* p, uint32_t value) { shared_store_value(p, value, "st_shared_b32"); }
template <typename Change>
void shared_change(uint32_t* p, const char* what, Change change) {
  yield();
  const uint32_t offset = shared_offset(p, 4, 4, what);
  uint32_t word;
  std::memcpy(&word, self->cta->generic + offset, 4);
  word = change(word);
  shared_store(offset, &word, 4);
  yield();
}
void red_shared_add(uint32_t* p, uint32_t value) {
  shared_change(p, "red_shared_add", [value](uint32_t word) { return word + value; });
}
void red_shared_or(uint32_t* p, uint32_t bits) {
  shared_change(p, "red_shared_or", [bits](uint32_t word) { return word | bits; });
}
void st_shared_f32(void* p, float value) { shared_store_value(p, value, "st_shared_f32"); }
void st_shared_v2_b32(void* p, uint32_t a, uint32_t b) { shared_store_value(p, Uint2{a, b}, "st_shared_v2_b32"); }
void st_shared_v2_f32(void* p, float x, float y) { shared_store_value(p, Float2{x, y}, "st_shared_v2_f32"); }
void st_shared_v4_b32(void* p, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  shared_store_value(p, Uint4{a, b, c, d}, "st_shared_v4_b32");
}
void st_shared_v4_b32(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  st_shared_v4_b32(const_cast<uint8_t*>(shared_pointer(address)), a, b, c, d);
}

// Returns an address whose highest byte is the rank of the CTA in its cluster, as on a GPU.
uint32_t smem_address(const void* pointer) {
  return self->cta->rank << 24 | (kSharedBase + shared_offset(pointer, 0, 1, "smem_address"));
}

void fence_proxy_async_shared() {
  for (const Range& range : self->unfenced)
    std::memcpy(self->cta->async + range.offset, self->cta->generic + range.offset, range.bytes);
  self->unfenced.clear();
  yield();
}

}  // namespace ptx

uint8_t* sim::dynamic_shared_memory(uint64_t bytes_needed) {
  if (bytes_needed > machine->launch.shared_bytes)
    fail("dynamic_shared: the kernel's plan of shared memory has " + text(bytes_needed) +
         " bytes, but it was launched with " + text(machine->launch.shared_bytes));
  return self->cta->generic;
}
