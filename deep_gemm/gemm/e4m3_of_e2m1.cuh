// Converts E2M1 values, four bits each, to E4M3 values whose exponents include the scale of their group of 32: each
// value is looked up in its group's table of eight bytes.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"

// Groups of 32 values of a row in a k-block, each with its own scale.
constexpr uint32_t kGroupsOfBlock = kBlockK / 32;
// E4M3 bytes of E2M1's magnitudes, by their three low bits: 0, 0.5, 1, 1.5, and 2, 3, 4, 6. Normal numbers, also times 2^-5 to 2^6.
constexpr uint32_t kLowValues = 0x3c383000, kHighValues = 0x4c484440;
constexpr uint32_t kShifts = 12, kShiftOfOne = 5, kMostShift = kShifts - 1 - kShiftOfOne;  // from 2^-5 on

// The factor of E4M3 values whose shifts turned a scale of 2^(most - 127) into 2^6, the largest shift.
DEVICE uint32_t bits_of_factor(uint32_t most) {
  return most > kMostShift ? most - kMostShift << 23 : 0x400000u >> kMostShift - most;
}

// The E4M3 bytes of a group's values, by their codes.
struct Table {
  uint32_t low, high;

  // `shift` counts from 2^-5. Zero stays zero; no other byte carries into the next one.
  DEVICE explicit Table(uint32_t shift)
      : low(kLowValues - kShiftOfOne * 0x08080800 + shift * 0x08080800),
        high(kHighValues - kShiftOfOne * 0x08080808 + shift * 0x08080808) {}
};

// Converts four values, in 16 bits.
DEVICE uint32_t e4m3_of(uint32_t codes, const Table& table) {
  const uint32_t magnitudes = ptx::byte_perm(table.low, table.high, codes & 0x7777);
  const uint32_t signs = ptx::byte_perm(codes << 4, codes, 0x5140);  // each code's sign, in the highest bit of its byte
  return magnitudes | (signs & 0x80808080);
}

// Converts eight values, in 32 bits.
DEVICE ptx::Uint2 e4m3_of_eight(uint32_t codes, const Table& table) {
  const uint32_t places = codes & 0x77777777, shifted = codes << 4;
  const uint32_t low = ptx::byte_perm(table.low, table.high, places);
  const uint32_t high = ptx::byte_perm(table.low, table.high, places >> 16);
  return {low | (ptx::byte_perm(shifted, codes, 0x5140) & 0x80808080),
          high | (ptx::byte_perm(shifted, codes, 0x7362) & 0x80808080)};
}

// Fills up a row's word of scales for a k-block with `groups` groups of the row. After the last group, the word repeats
// the first group's scale, because the values there are zero.
DEVICE uint32_t scales_within(uint32_t word, uint32_t groups) {
  if (groups < kGroupsOfBlock) word = ptx::byte_perm(word, 0, groups == 1 ? 0x0000 : groups == 2 ? 0x0010 : 0x0210);
  return word;
}
