// A piece cast to E2M1: two values to a byte, the first in its lower half.
//
// Hopper converts to E4M3, not to E2M1. But E2M1's numbers times 2^-6 are numbers of E4M3, and the E4M3 byte of such a
// number has E2M1's code in its bits 2 to 4.
#pragma once
#include "cast/values.cuh"

constexpr float kLargestOfE2m1 = 6.f;
// A block's largest magnitude is scaled to this. MXFP4 scales it up to 7, which is then rounded down to 6: E2M1's next number
// would be 8.
constexpr float kLargestValue = kCutsLargest ? 7.f : kLargestOfE2m1;

// The nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, a tie to the even code, with the sign, times 2^-6. NaN stays NaN.
DEVICE float nearest_e2m1(float quotient) {
  const float magnitude = ptx::abs_f32(ptx::min_magnitude(quotient, kLargestOfE2m1));
  // The largest power of two up to the magnitude, at least 1: below 1 the numbers are as far apart as above it.
  const float power = ptx::float_of(ptx::bits_of(ptx::max_f32(magnitude, 1.f)) & 0x7f800000);
  // The last bit of numbers as large as `away` is half of `power`, the distance between the numbers of E2M1 here. So
  // the sum is rounded to such a number. `away` is an even multiple of this bit, so a tie becomes an even code.
  const float away = power * 0x1p22f;
  const float nearest = (magnitude + away) - away;
  return ptx::float_of(ptx::bits_of(nearest * 0x1p-6f) | (ptx::bits_of(quotient) & 0x80000000));
}

// The codes of four elements, each in the lower half of a byte.
DEVICE uint32_t codes_of(float a, float b, float c, float d) {
  const uint32_t bytes = pack_quotients(nearest_e2m1(a), nearest_e2m1(b), nearest_e2m1(c), nearest_e2m1(d));
  return (bytes >> 2 & 0x07070707) | (bytes >> 4 & 0x08080808);
}

// All codes of a lane, in the lowest bytes.
struct Values {
  uint32_t word;

  // Even lanes have both halves of a byte, and rows an even number of columns.
  DEVICE void store_one(uint8_t* row, uint32_t column, uint32_t i) const {
    if (ptx::lane_index() % 2 == 0) ptx::st_global_b8(row + column / 2, word >> i * 8);
  }

  DEVICE void store(uint8_t* row, uint32_t column) const {
    if constexpr (kVector == 8)
      ptx::st_global_b32(row + column / 2, word);
    else
      ptx::st_global_b16(row + column / 2, word);
  }
};

// All lanes of a warp call this together.
DEVICE Values pack_values(const float (&v)[kElements]) {
  const uint32_t first = codes_of(v[0], v[1], v[2], v[3]);
  // The neighbouring lane has the codes of the other half of each byte. Odd lanes do not store.
  if constexpr (kVector == 1) return {first | ptx::shfl_sync(first, ptx::lane_index() ^ 1) << 4};
  uint32_t second = 0;
  if constexpr (kElements == 8) second = codes_of(v[4], v[5], v[6], v[7]);
  return {ptx::byte_perm(first | first >> 4, second | second >> 4, 0x6420)};
}
