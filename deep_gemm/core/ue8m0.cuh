// Scales that are powers of two, in words of UE8M0: a word has four exponents along k, the first in the lowest byte.
#pragma once
#include "types.cuh"

// Bits for the operands whose scales are words, as in `Words` of core/check/ue8m0.py. Without its bit, scales are FP32.
constexpr uint32_t kWordsOfA = 1, kWordsOfB = 2;

// The FP32 bits of 2^(s - 127), the number that the UE8M0 exponent `s` means; NaN for 255.
DEVICE uint32_t bits_of_scale(uint32_t s) { return s == 255 ? 0x7fffffff : s == 0 ? 0x400000 : s << 23; }

// The FP32 bits of scale number `place` along k. `word` is the word that holds it.
DEVICE uint32_t bits_of_scale_at(uint32_t place, uint32_t word) { return bits_of_scale(word >> place % 4 * 8 & 255); }
