// What the kernels that cast share: elements as a lane holds them, largest magnitudes, and where scales and values lie.
#pragma once
#include "cast/division.cuh"
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

// ---- Elements
//
// A team of lanes takes kBlock columns of a row, those under one scale. A lane holds 16 bytes of them that lie beside each other
// or, where rows may not be loaded so, four elements that are kLanes columns apart. A word has two elements of 16 bits.

constexpr uint32_t kLanes = kBlock / (kVector == 1 ? 4 : kVector);
constexpr uint32_t kTeams = kNumThreads / kLanes;
constexpr uint32_t kLanesOfWarp = kLanes < 32 ? kLanes : 32;  // of a team
constexpr uint32_t kElements = kBlock / kLanes;
constexpr uint32_t kElementsOfWord = 4 / kInputBytes;
constexpr uint32_t kWords = kElements / kElementsOfWord;

// Number i of blocks that lie in rows of `blocks`.
struct BlockOfRows {
  uint32_t row, block;

  // `reciprocal` is 2^32 / blocks, rounded down, or 2^32 - 1 if there is one. So the quotient is one too small at most.
  DEVICE BlockOfRows(uint32_t i, uint32_t blocks, uint32_t reciprocal)
      : row(static_cast<uint64_t>(i) * reciprocal >> 32), block(i - row * blocks) {
    if (block >= blocks) ++row, block -= blocks;
  }
};

struct Piece {
  uint32_t words[kWords];
};

// FP32 numbers that were computed from what a lane loaded.
struct Computed {
  uint32_t words[kElements];
};
constexpr bool kCastsFp32 = kInputIsFp32 || kActivates;

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

DEVICE float element_of(const Computed& computed, uint32_t element) { return ptx::float_of(computed.words[element]); }

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

// ---- Ordinary and any
//
// Nearly all blocks are ordinary: without infinities, and not of the very smallest numbers. What casts them
// fast (kIsOrdinary) finds out if they are not. Then the same values are cast again, in a way that is right for any.

// ---- Largest magnitudes
//
constexpr uint32_t kInfinity = 0x7f800000, kNan = 0x7fc00000;  // of FP32

// A key is a word's magnitudes. A NaN is no larger than another, or the largest if kMarksBlocks; neither NaN nor infinities
// count in blocks of any kind.

template <bool kIsOrdinary>
DEVICE uint32_t key_of(uint32_t word) {
  const uint32_t key = kCastsFp32 ? ptx::bits_of(ptx::abs_f32(ptx::float_of(word))) : word & 0x7fff7fff;
  if constexpr (kIsOrdinary) return key;
  if constexpr (kCastsFp32) return key >= kInfinity ? 0 : key;
  // The sum carries what is not finite into the sign. The two of a word do not reach into each other.
  const uint32_t is_not_finite = (key + (kInputIsFp16 ? 0x04000400 : 0x00800080)) >> 15 & 0x00010001;
  return key & ~(is_not_finite * 0xffff);
}

// A word of two magnitudes gives the larger one of each.
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

// The largest keys of a team, or of a warp in a larger one, of kCount keys that each lane has: lane i gets that of
// keys[i % kCount]. Each lane hands half of its keys to another lane, until one key is left.
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
        // Values are chosen, not places: an index that only a lane knows costs a comparison for each key.
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
