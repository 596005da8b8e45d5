// What the kernels that cast share: elements as a lane holds them, largest magnitudes, scales, and FP8 quotients.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

constexpr uint32_t kBlock = 128;                  // elements under one scale, of a row or of a column
constexpr float kLargest = 448.f;                 // of E4M3
constexpr float kLeastScale = 1.1754943508e-38f;  // 2^-126, the smallest normal number

// ---- Elements
//
// A team of lanes takes 128 columns of a row. A lane holds 16 bytes of them that lie beside each other or, where rows may not
// be loaded so, four elements that are 32 columns apart. A word has two elements of 16 bits.

constexpr uint32_t kLanes = kBlock / kVector < 32 ? kBlock / kVector : 32;
constexpr uint32_t kTeams = kNumThreads / kLanes;
constexpr uint32_t kElements = kBlock / kLanes;
constexpr uint32_t kElementsOfWord = 4 / kInputBytes;
constexpr uint32_t kWords = kElements / kElementsOfWord;

struct Piece {
  uint32_t words[kWords];
};

// The column of a lane's element, counted from the first of the 128.
DEVICE uint32_t column_of(uint32_t lane, uint32_t element) {
  return kVector == 1 ? element * kLanes + lane : lane * kVector + element;
}

DEVICE ptx::Float2 unpack(uint32_t word) {
  if constexpr (kInputIsFp32)
    return {ptx::float_of(word), 0.f};
  else
    return kInputIsFp16 ? ptx::unpack_f16(word) : ptx::unpack_bf16(word);
}

DEVICE float element_of(const Piece& piece, uint32_t element) {
  const ptx::Float2 elements = unpack(piece.words[element / kElementsOfWord]);
  return element % kElementsOfWord == 0 ? elements.x : elements.y;
}

// Columns from `end` on, and rows that are not there, count as zeros. `row` is the address of the row's first column.
DEVICE Piece load_piece(const uint8_t* row, bool is_there, uint32_t first_column, uint32_t end, uint32_t lane) {
  Piece piece = {};
  if constexpr (kVector == 1) {
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) {
      const uint32_t column = first_column + column_of(lane, i);
      if (!is_there || column >= end) continue;
      const uint8_t* from = row + uint64_t{column} * kInputBytes;
      if constexpr (kInputIsFp32)
        piece.words[i] = ptx::ld_global_nc_b32(from);
      else
        piece.words[i / 2] |= ptx::ld_global_nc_b16(from) << i % 2 * 16;
    }
  } else {
    const uint32_t column = first_column + column_of(lane, 0);
    if (is_there && column < end) {
      const ptx::Uint4 loaded = ptx::ld_global_nc_v4_b32(row + uint64_t{column} * kInputBytes);
      piece.words[0] = loaded.x, piece.words[1] = loaded.y, piece.words[2] = loaded.z, piece.words[3] = loaded.w;
    }
  }
  return piece;
}

// ---- Largest magnitudes
//
// A key is a word's magnitudes as signed integers, in the order of the magnitudes: the sum carries infinities and NaNs into
// the sign, so that they are below all others. The two of a word do not reach into each other.

constexpr uint32_t kMagnitudes = kInputIsFp32 ? 0x7fffffff : 0x7fff7fff;
constexpr uint32_t kKeyOfZero = kInputIsFp32 ? 0x00800000 : kInputIsFp16 ? 0x04000400 : 0x00800080;

DEVICE uint32_t key_of(uint32_t word) { return (word & kMagnitudes) + kKeyOfZero; }

// A word of two magnitudes gives the larger one of each.
DEVICE uint32_t larger_key(uint32_t a, uint32_t b) {
  if constexpr (kInputIsFp32)
    return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b;
  else
    return ptx::max_s16x2(a, b);
}

DEVICE uint32_t key_of(const Piece& piece) {
  uint32_t key = kKeyOfZero;
#pragma unroll
  for (uint32_t word : piece.words) key = larger_key(key, key_of(word));
  return key;
}

// The magnitudes of a key that is not below zero's.
DEVICE ptx::Float2 amaxes_of(uint32_t key) { return unpack(key - kKeyOfZero); }
DEVICE float amax_of(uint32_t key) {
  const ptx::Float2 both = amaxes_of(key);
  return both.x > both.y ? both.x : both.y;
}

// The largest keys of a team, of kCount keys that each lane has: lane i gets that of keys[i % kCount]. Each lane hands half of
// what it has to another lane, until one key is left.
template <uint32_t kCount>
DEVICE uint32_t largest_of_team(uint32_t (&keys)[kCount], uint32_t lane) {
  static_assert((kCount & (kCount - 1)) == 0 && kCount <= kLanes, "a lane for each key");
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    const uint32_t other = ptx::lane_index() ^ distance;
    if (distance < kCount) {
      const bool is_odd = (lane & distance) != 0;
#pragma unroll
      for (uint32_t i = 0; i < kCount / 2 / distance; ++i) {
        const uint32_t kept = keys[is_odd ? 2 * i + 1 : 2 * i], given = keys[is_odd ? 2 * i : 2 * i + 1];
        keys[i] = larger_key(kept, ptx::shfl_sync(given, other));
      }
    } else {
      keys[0] = larger_key(keys[0], ptx::shfl_sync(keys[0], other));
    }
  }
  return keys[0];
}

// ---- Scales, and division by them

// A scale, and -1 over its significand, which lies in [1, 2).
struct Divisor {
  float scale, reciprocal;
};

DEVICE float significand_of(float scale) { return ptx::float_of((ptx::bits_of(scale) & 0x7fffff) | 0x3f800000); }

// The divisor of elements whose largest magnitude is `amax`; it counts as at least `min_amax`.
DEVICE Divisor divisor_of(float amax, float min_amax, bool rounds_up) {
  amax = amax < min_amax ? min_amax : amax;
  const float quotient = ptx::div_rn(amax, kLargest), least = quotient < kLeastScale ? kLeastScale : quotient;
  // Up to a power of two: a carry out of the mantissa is the next one.
  const float power = ptx::float_of((ptx::bits_of(least) + 0x7fffff) & 0x7f800000);
  const float scale = amax == 0.f ? 1.f : rounds_up ? power : least;
  return {scale, ptx::div_rn(-1.f, significand_of(scale))};
}

DEVICE Divisor load_divisor(const Divisor* from) {
  const ptx::Float2 loaded = ptx::ld_shared_v2_f32(from);
  return {loaded.x, loaded.y};
}
DEVICE void store_divisor(Divisor* to, Divisor d) { ptx::st_shared_v2_f32(to, d.scale, d.reciprocal); }

// x / scale as a division rounds it, for |x| <= 448 * scale, zeros with their signs, and NaN. An infinity becomes a number
// above 448. Numbers by a power of two that make the scale a significand: so nothing below underflows that FP8 can tell
// from zero. `guess` is off by two units in the last place at most, and `excess` is exact; one step from there gives the
// rounded quotient wherever FP8 rounds differently on its two sides. (The test of hard quotients has all that are near.)
DEVICE float quotient_of(float x, Divisor d) {
  const float power = ptx::float_of(0x7f000000 - (ptx::bits_of(d.scale) & 0x7f800000));
  const float reduced = ptx::min_magnitude(x * power, 1024.f);
  const float guess = reduced * -d.reciprocal;
  const float excess = ptx::fma(guess, significand_of(d.scale), -reduced);
  return ptx::fma(excess, d.reciprocal, guess);
}

DEVICE uint32_t pack_quotients(float a, float b, float c, float d) {
  return ptx::pack_e4m3(a, b) | ptx::pack_e4m3(c, d) << 16;
}

// What became of a piece, to where the piece was: `row` is the address of the first column's FP8 value.
DEVICE void store_piece(uint8_t* row, uint32_t first_column, uint32_t end, uint32_t lane, const float (&v)[kElements]) {
  if constexpr (kVector == 1) {
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) {
      const uint32_t column = first_column + column_of(lane, i);
      if (column < end) ptx::st_global_b8(row + column, ptx::pack_e4m3(v[i], 0.f));
    }
  } else {
    const uint32_t column = first_column + column_of(lane, 0);
    if (column >= end) return;
    const uint32_t low = pack_quotients(v[0], v[1], v[2], v[3]);
    if constexpr (kVector == 8)
      ptx::st_global_v2_b32(row + column, low, pack_quotients(v[4], v[5], v[6], v[7]));
    else
      ptx::st_global_b32(row + column, low);
  }
}
