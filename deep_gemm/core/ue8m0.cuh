// Scales that are powers of two, in words of UE8M0: four exponents of a row along k, the first in the lowest byte.
#pragma once
#include "types.cuh"

// Operands whose scales are words, as in `Words` of core/check/ue8m0.py; the scales of others are FP32.
constexpr uint32_t kWordsOfA = 1, kWordsOfB = 2;

// 2^(s - 127), the number that UE8M0's `s` stands for; NaN for 255.
DEVICE uint32_t bits_of_scale(uint32_t s) { return s == 255 ? 0x7fffffff : s == 0 ? 0x400000 : s << 23; }

// The scale at a place along k, from the word that holds it.
DEVICE uint32_t bits_of_scale_at(uint32_t place, uint32_t word) { return bits_of_scale(word >> place % 4 * 8 & 255); }
