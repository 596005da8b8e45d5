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

// ---- Scales that are powers of two, in words of UE8M0: a word has four exponents along k, the first in the lowest byte.

// Bits for the operands whose scales are words, as in `Words` of core/check/ue8m0.py. Without its bit, scales are FP32.
constexpr uint32_t kWordsOfA = 1, kWordsOfB = 2;

// The FP32 bits of 2^(s - 127), the number that the UE8M0 exponent `s` means; NaN for 255.
DEVICE uint32_t bits_of_scale(uint32_t s) { return s == 255 ? 0x7fffffff : s == 0 ? 0x400000 : s << 23; }

// The FP32 bits of scale number `place` along k. `word` is the word that holds it.
DEVICE uint32_t bits_of_scale_at(uint32_t place, uint32_t word) { return bits_of_scale(word >> place % 4 * 8 & 255); }
