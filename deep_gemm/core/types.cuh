// Types and helpers that every source uses.
#pragma once
#include "ptx/platform.cuh"

DEVICE_CONSTEXPR uint32_t ceil_div(uint32_t x, uint32_t y) { return (x + y - 1) / y; }

DEVICE_CONSTEXPR uint32_t greatest_common_divisor(uint32_t x, uint32_t y) {
  return y == 0 ? x : greatest_common_divisor(y, x % y);
}

// Part `index` of `blocks` blocks, split into `parts` parts as evenly as possible. Longer parts are first.
struct Part {
  uint32_t first, count;

  DEVICE Part(uint32_t blocks, uint32_t parts, uint32_t index) {
    const uint32_t each = blocks / parts, more = blocks % parts;
    first = index * each + (index < more ? index : more);
    count = each + (index < more ? 1 : 0);
  }
};
