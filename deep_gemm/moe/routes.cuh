// Reads the experts of routes from a caller's ids, of 4 or 8 bytes. An id may belong to no expert.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr uint32_t kNoExpert = ~0u;

// Loads the id at index `at` as two words. To load several, request all of them before using the first.
DEVICE ptx::Uint2 load_id(const uint8_t* ids, uint64_t at) {
  if constexpr (kIdBytes == 8) return ptx::ld_global_v2_b32(ids + at * 8);
  return {ptx::ld_global_b32(ids + at * 4), 0};
}

// Returns the expert with an id, counted from `first`; kNoExpert if it is not one of the `count` experts.
DEVICE uint32_t expert_of(const ptx::Uint2& words, uint32_t first, uint32_t count) {
  const uint32_t id = words.y == 0 ? words.x : kNoExpert;
  return id - first < count ? id - first : kNoExpert;  // kNoExpert is larger than any expert's number, whatever `first` is
}

DEVICE uint32_t load_expert(const uint8_t* ids, uint64_t at, uint32_t first, uint32_t count) {
  return expert_of(load_id(ids, at), first, count);
}
