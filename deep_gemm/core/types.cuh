// What every source uses.
#pragma once
#include "ptx/platform.cuh"

DEVICE_CONSTEXPR uint32_t ceil_div(uint32_t x, uint32_t y) { return (x + y - 1) / y; }

DEVICE_CONSTEXPR uint32_t greatest_common_divisor(uint32_t x, uint32_t y) {
  return y == 0 ? x : greatest_common_divisor(y, x % y);
}
