// Common code of the kernels that cast: a lane's elements, largest magnitudes, and scales in memory.
#pragma once
#include "cast/division.cuh"
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

// ---- Elements
//
// A team of lanes casts kBlock columns of a row, which share a scale. A lane holds 16 adjacent bytes. If rows
// are not aligned (kVector == 1), it holds four elements, kLanes columns apart. A word has two elements of 16 bits.

constexpr uint32_t kLanes = kBlock / (kVector == 1 ? 4 : kVector);
constexpr uint32_t kTeams = kNumThreads / kLanes;
constexpr uint32_t kLanesOfWarp = kLanes < 32 ? kLanes : 32;  // lanes of a team in one warp
constexpr uint32_t kElements = kBlock / kLanes;
constexpr uint32_t kElementsOfWord = 4 / kInputBytes;
constexpr uint32_t kWords = kElements / kElementsOfWord;

// The row of block `i`, and the block's index in this row, if each row has `blocks` blocks.
struct BlockOfRows {
  uint32_t row, block;

  // `reciprocal` is 2^32 / blocks, rounded down, or 2^32 - 1 if blocks is 1. So the quotient is too small by at most 1.
  DEVICE BlockOfRows(uint32_t i, uint32_t blocks, uint32_t reciprocal)
      : row(static_cast<uint64_t>(i) * reciprocal >> 32), block(i - row * blocks) {
    if (block >= blocks) ++row, block -= blocks;
  }
};

struct Piece {
  uint32_t words[kWords];
};

// A lane's elements as FP32 numbers, computed from its loaded pieces.
struct Computed {
  uint32_t words[kElements];
};
constexpr bool kCastsFp32 = kInputIsFp32 || kActivates;

// The column of a lane's element, counted from the team's first column.
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

DEVICE float element_of(const Computed& computed, uint32_t element) { return ptx::float_of(computed.words[element]); }

// Loads a lane's elements. Columns from `end` on, and a missing row, are zeros. `row` is the address of column 0.
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

// Stores a lane's values in the columns of its piece below `end`. `row` is the address of column 0.
template <typename Values>
DEVICE void store_values(uint8_t* row, uint32_t first_column, uint32_t end, uint32_t lane, const Values& values) {
  if constexpr (kVector == 1) {
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) {
      const uint32_t column = first_column + column_of(lane, i);
      if (column < end) values.store_one(row, column, i);
    }
  } else {
    const uint32_t column = first_column + column_of(lane, 0);
    if (column < end) values.store(row, column);
  }
}

// ---- Ordinary blocks
//
// Nearly all blocks are ordinary: they have no infinities, and their numbers are not extremely small. The fast cast
// (kIsOrdinary) detects a block that is not ordinary. Then the general cast converts the same numbers again.

// ---- Largest magnitudes

constexpr uint32_t kInfinity = 0x7f800000, kNan = 0x7fc00000;  // of FP32

// A key holds a word's magnitudes. `larger_key` ignores a NaN, or returns the NaN if kMarksBlocks. Without kIsOrdinary,
// NaN and infinities count as zeros.

template <bool kIsOrdinary>
DEVICE uint32_t key_of(uint32_t word) {
  const uint32_t key = kCastsFp32 ? ptx::bits_of(ptx::abs_f32(ptx::float_of(word))) : word & 0x7fff7fff;
  if constexpr (kIsOrdinary) return key;
  if constexpr (kCastsFp32) return key >= kInfinity ? 0 : key;
  // The sum carries into the sign bit only for an infinity or a NaN. No carry reaches the word's other half.
  const uint32_t is_not_finite = (key + (kInputIsFp16 ? 0x04000400 : 0x00800080)) >> 15 & 0x00010001;
  return key & ~(is_not_finite * 0xffff);
}

// Returns the larger magnitude, in each half of a word with two magnitudes.
DEVICE uint32_t larger_key(uint32_t a, uint32_t b) {
  if constexpr (kMarksBlocks && kCastsFp32)
    return ptx::bits_of(ptx::max_nan_f32(ptx::float_of(a), ptx::float_of(b)));
  else if constexpr (kMarksBlocks)
    return kInputIsFp16 ? ptx::max_nan_f16x2(a, b) : ptx::max_nan_bf16x2(a, b);
  else if constexpr (kCastsFp32)
    return ptx::bits_of(ptx::max_f32(ptx::float_of(a), ptx::float_of(b)));
  else
    return kInputIsFp16 ? ptx::max_f16x2(a, b) : ptx::max_bf16x2(a, b);
}

template <bool kIsOrdinary, typename Held>
DEVICE uint32_t key_of(const Held& held) {
  uint32_t key = 0;
#pragma unroll
  for (uint32_t word : held.words) key = larger_key(key, key_of<kIsOrdinary>(word));
  return key;
}

DEVICE ptx::Float2 amaxes_of(uint32_t key) { return kCastsFp32 ? ptx::Float2{ptx::float_of(key), 0.f} : unpack(key); }
DEVICE float amax_of(uint32_t key) { return amaxes_of(kCastsFp32 ? key : larger_key(key, key >> 16)).x; }

// Each lane has kCount keys. Lane i returns the largest keys[i % kCount] in its team, or in its warp if a team has
// several warps. In each step, a lane passes half of its keys to another lane, until one key is left.
template <uint32_t kCount>
DEVICE uint32_t largest_of_team(uint32_t (&keys)[kCount], uint32_t lane) {
  static_assert((kCount & (kCount - 1)) == 0 && kCount <= kLanes, "a lane for each key");
#pragma unroll
  for (uint32_t distance = 1; distance < kLanesOfWarp; distance *= 2) {
    const uint32_t other = ptx::lane_index() ^ distance;
    if (distance < kCount) {
      const bool is_odd = (lane & distance) != 0;
#pragma unroll
      for (uint32_t i = 0; i < kCount / 2 / distance; ++i) {
        // Select values, not indices: an index that differs between lanes needs a comparison for each key.
        const uint32_t even = keys[2 * i], odd = keys[2 * i + 1];
        keys[i] = larger_key(is_odd ? odd : even, ptx::shfl_sync(is_odd ? even : odd, other));
      }
    } else {
      keys[0] = larger_key(keys[0], ptx::shfl_sync(keys[0], other));
    }
  }
  return keys[0];
}

// ---- Scales in memory

DEVICE Divisor load_divisor(const Divisor* from) {
  const ptx::Float2 loaded = ptx::ld_shared_v2_f32(from);
  return {loaded.x, loaded.y};
}
DEVICE void store_divisor(Divisor* to, Divisor d) { ptx::st_shared_v2_f32(to, d.scale, d.reciprocal); }

DEVICE uint8_t* scale_at(uint8_t* scales, uint32_t row, uint32_t stride_m, uint32_t block, uint32_t stride_k) {
  return scales + uint64_t{row} * stride_m + uint64_t{block} * stride_k;
}
