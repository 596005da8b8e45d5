// The experts of routes as callers give them: ids of 4 or 8 bytes, some of which no expert has.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "types.cuh"

constexpr uint32_t kNoExpert = ~0u;

// The expert that has the id at place `at`, counted from `first`; kNoExpert if it is not one of `count`.
DEVICE uint32_t load_expert(const uint8_t* ids, uint64_t at, uint32_t first, uint32_t count) {
  uint32_t id;
  if constexpr (kIdBytes == 8) {
    const ptx::Uint2 words = ptx::ld_global_v2_b32(ids + at * 8);
    id = words.y == 0 ? words.x : kNoExpert;
  } else {
    id = ptx::ld_global_b32(ids + at * 4);
  }
  return id - first < count ? id - first : kNoExpert;  // none has so large a number, whatever `first` is
}
