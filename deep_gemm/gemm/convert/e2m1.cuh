// B is MXFP4: two E2M1 values in a byte, and a scale 2^s for each 32 values of a row. A converting warp turns 32 rows
// of a slot into E4M3 in place:
//
//   TMA          64 bytes of each row of B            -> the first half of the 32 rows' memory in the slot, swizzled by 64 bytes
//   scaling      scales of a k-block from memory      -> a shift for each 32 values, a factor for each 64 rows, after A's scales
//   converting   packed --wait--> bytes, shifts -> registers -> E4M3 in the rows' memory, swizzled by 128 bytes --arrive--> full
//   math         full --wait--> WGMMA, promote by sfa and the rows' factors
//
// The scales of 64 rows of a k-block fold into the exponents of E4M3 if they are at most 2^11 apart. Their common part
// is the factor. If scales of a tile are further apart, its k-blocks are multiplied in several passes: each pass
// multiplies only the values of the next scales, and zeros for all other values. So each value is multiplied once, and
// the number of passes depends on the tile's scales alone. The scaling warps (the producer's, one for each 64 rows of a
// tile) count the passes, and tell all other roles the number at the end of the first pass.
#pragma once
#include "config.cuh"
#include "e4m3_of_e2m1.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include WORK

constexpr uint32_t kPassSlots = 4;
static_assert(kConvertRows == 32 && kBlockN == kScalingWarps * 64, "64 rows for each scaling warp");
// Marks that replace a shift: kZeros if these values belong to another pass, kNaNs if their scale is NaN.
constexpr uint32_t kZeros = 0x80, kNaNs = 0x40;

struct ConvertStorage {
  alignas(16) uint32_t shifts[kNumStages][kBlockN];  // of a row's four groups, one byte each, counted from 2^-5
  uint64_t packed[kNumStages];
  uint64_t counted[kPassSlots], known[kPassSlots];
  alignas(8) ptx::Uint2 passes[kPassSlots];  // for each scaling warp, the passes that its rows of the tile need

  DEVICE void init() {
    for (uint64_t& barrier : packed) ptx::mbarrier_init(&barrier, 1 + kScalingWarps);  // the loading thread arrives too
    for (uint32_t slot = 0; slot < kPassSlots; ++slot) {
      ptx::mbarrier_init(&counted[slot], kScalingWarps);
      ptx::mbarrier_init(&known[slot], 1 + kScalingWarps + kConvertGroups * kConvertWarps + kNumMathWarps);  // all roles
    }
  }

  DEVICE uint64_t* full_of_b(uint64_t*, uint32_t stage) { return &packed[stage]; }
};

// Counts a role's passes over a tile's k-blocks. The role calls `again` after each pass: true means another pass.
struct Passes {
  ConvertStorage& storage;
  uint32_t at = 0;  // 256 * finished tiles + passes left of this tile: one register, because math warps have few

  DEVICE explicit Passes(ConvertStorage& storage_) : storage(storage_) {}

  template <bool kIsWarp>
  DEVICE bool again() {
    if (at % 256 == 0) {
      const uint32_t number = at / 256, slot = number % kPassSlots;
      ptx::mbarrier_wait_parity(&storage.counted[slot], number / kPassSlots & 1);
      const ptx::Uint2 needed = ptx::ld_shared_v2_b32(&storage.passes[slot]);
      const uint32_t read = kScalingWarps == 1 || needed.x > needed.y ? needed.x : needed.y;
      at += 256 + (kIsWarp ? ptx::shfl_sync(read, 0) : read);
      ptx::mbarrier_arrive_after(&storage.known[slot], read, !kIsWarp || ptx::lane_index() == 0);
    }
    return --at % 256 != 0;
  }

  // Announces the passes that a scaling warp's rows need. The warp calls this before `again`.
  DEVICE void tell(uint32_t which, uint32_t needed) {
    const uint32_t number = at / 256, slot = number % kPassSlots;
    ptx::mbarrier_wait_parity(&storage.known[slot], (number / kPassSlots & 1) ^ 1);
    if (ptx::lane_index() == 0) {
      ptx::st_shared_b32(which == 0 ? &storage.passes[slot].x : &storage.passes[slot].y, needed);
      ptx::mbarrier_arrive(&storage.counted[slot]);
    }
    ptx::syncwarp();
  }
};

// ---- The warps that scale
//
// Scales are compared by their order: the exponent plus 1, or 0 for NaN, which cannot be ordered.

DEVICE uint32_t order_of(uint32_t word, uint32_t group) { return (word >> group * 8) + 1 & 255; }

// The largest of a word's four orders that is too small to fold together with `above`.
DEVICE uint32_t most_of_word(uint32_t word, uint32_t above) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t g = 0; g < kGroupsOfBlock; ++g) {
    const uint32_t order = order_of(word, g);
    most = order > most && order + kShifts <= above ? order : most;
  }
  return most;
}

// The factor of values whose shifts turned the scale of this order into 2^6, the largest shift.
DEVICE float factor_of(uint32_t order) { return ptx::float_of(bits_of_factor(order > 0 ? order - 1 : 0)); }

DEVICE uint32_t reduce_max_sync(uint32_t value) { return ~ptx::reduce_min_sync(~value); }
DEVICE uint32_t reduce_most_sync(const uint32_t (&words)[2], uint32_t above) {
  const uint32_t first = most_of_word(words[0], above), second = most_of_word(words[1], above);
  return reduce_max_sync(first > second ? first : second);
}

// Scales of 64 rows of B; each lane of a scaling warp has two rows. Scales seldom change much from one k-block to
// the next, so `most` stays unchanged while the scales fold with it.
struct RowsOf64 {
  const uint32_t* next[2];  // the lane's two words of scales to load next
  uint32_t coming[2];
  uint32_t most;  // the largest order that folds: 12 to 251
  float factor;   // the factor of scales that fold with `most`

  // Computes the words' shifts; true if all scales fold. As `most` is 12 to 251, a scale that does not fold, or NaN,
  // results in a shift of more than 11, or one that borrows from the next byte.
  DEVICE bool fold(const uint32_t (&words)[2], uint32_t (&shifts)[2]) const {
    uint32_t outside = 0;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      shifts[i] = words[i] + (kShifts - most) * 0x01010101;
      outside |= shifts[i] | shifts[i] + 0x04040404;
    }
    return (outside & 0xf0f0f0f0) == 0;
  }

  // If the largest and the smallest scale can fold together, moves `most` so that they are in the middle of its range.
  DEVICE bool folds_anew(const uint32_t (&words)[2], uint32_t (&shifts)[2]) {
    uint32_t largest = 0, smallest = 255;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
#pragma unroll
      for (uint32_t g = 0; g < kGroupsOfBlock; ++g) {
        const uint32_t order = order_of(words[i], g);
        largest = order > largest ? order : largest, smallest = order < smallest ? order : smallest;
      }
    largest = reduce_max_sync(largest), smallest = ptx::reduce_min_sync(smallest);
    const uint32_t order = largest + (smallest + kShifts - 1 - largest) / 2;
    if (largest - smallest >= kShifts || order - kShifts >= 240) return false;
    most = order, factor = factor_of(order);
    fold(words, shifts);
    return true;
  }

  // Computes shifts, or marks, for one of several passes. Returns the number of passes; sets `factor` to
  // this pass's factor.
  static DEVICE uint32_t shift_apart(const uint32_t (&words)[2], uint32_t pass, uint32_t (&shifts)[2], float& factor) {
    uint32_t passes = 0, order = 0;
    for (uint32_t found = reduce_most_sync(words, 255 + kShifts); found != 0; found = reduce_most_sync(words, found), ++passes)
      order = passes <= pass ? found : order;
    if (passes <= pass) order = 0;  // this pass has no scales left
    factor = factor_of(order);
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      shifts[i] = 0;
#pragma unroll
      for (uint32_t g = 0; g < kGroupsOfBlock; ++g) {
        const uint32_t of_group = order_of(words[i], g), shift = of_group + (kShifts - 1) - order;
        shifts[i] |= (of_group == 0 ? kNaNs : shift >= kShifts ? kZeros : shift) << g * 8;
      }
    }
    return passes;
  }
};

// k-blocks whose words of a row fill one sector, if the words are contiguous. DRAM is read in whole sectors.
constexpr uint32_t kWordsOfSector = 8;

// The role of the producer's last warps: each has 64 rows of a tile.
template <typename Storage>
DEVICE void scale_tiles(const Params& p, Storage& shared, Tiles& tiles, uint32_t which) {
  const uint32_t lane = ptx::lane_index();
  Passes passes(shared.roles);
  RingPosition at;
  RowsOf64 rows;
  for (Tile tile; tiles.next(tile);) {
    const KBlocks k_blocks = k_blocks_of(p, tile);
    uint32_t pass = 0, needed = 1;
    do {
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t row = tile.row_n + which * 64 + i * 32 + lane;  // rows past the last use the last row's scales
        rows.next[i] = reinterpret_cast<const uint32_t*>(sfb_of(p, tile)) +
                       static_cast<uint64_t>(row < p.n ? row : p.n - 1) * p.sfb_stride_n +
                       static_cast<uint64_t>(k_blocks.first) * p.sfb_stride_k;
        if (!k_blocks.are_none()) rows.coming[i] = ptx::ld_global_b32(rows.next[i]);
      }
      rows.most = kShifts, rows.factor = factor_of(kShifts);  // a tile's bits must not depend on the previous tile
#pragma unroll 1
      for (uint32_t k_block = k_blocks.first; k_block < k_blocks.end; ++k_block, at = at.next()) {
        uint32_t words[2], shifts[2];
        const bool prefetches = k_block + kWordsOfSector < k_blocks.end && (p.sfb_stride_k != 1 || k_block % kWordsOfSector == 0);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          words[i] = rows.coming[i];
          rows.next[i] += p.sfb_stride_k;
          if (prefetches) ptx::prefetch_l2(rows.next[i] + (kWordsOfSector - 1) * static_cast<uint64_t>(p.sfb_stride_k));
          if (k_block + 1 < k_blocks.end) rows.coming[i] = ptx::ld_global_b32(rows.next[i]);
        }
        if (k_block + 1 == k_blocks.end)
#pragma unroll
          for (uint32_t& word : words) word = scales_within(word, (p.k - k_block * kBlockK) / 32);
        const bool folds = rows.fold(words, shifts);
        float factor = rows.factor;
        if (__builtin_expect(!ptx::all_sync(pass == 0 && folds), 0)) {
          if (pass == 0 && rows.folds_anew(words, shifts)) {
            factor = rows.factor;
          } else {
            const uint32_t of_rows = RowsOf64::shift_apart(words, pass, shifts, factor);
            needed = of_rows > needed ? of_rows : needed;
          }
        }
        wait_until_free(shared.ring, at);
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i)
          ptx::st_shared_b32(&shared.roles.shifts[at.stage][which * 64 + i * 32 + lane], shifts[i]);
        if (lane == 0) ptx::st_shared_f32(&shared.scales[at.stage][kScaleRows + which], factor);
        ptx::syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&shared.roles.packed[at.stage]);
      }
      if (pass++ == 0) passes.tell(which, needed);
    } while (passes.again<true>());
  }
}

// ---- The warps that convert

// A lane converts two groups of a row in each of two rounds of 16 rows.
constexpr uint32_t kRowsOfRound = 16;

struct Tables {
  Table of[kGroupsOfBlock];

  // A byte of `shifts` is a group's shift, or a mark: kZeros, kNaNs.
  DEVICE explicit Tables(uint32_t shifts)
      : of{Table(shifts & 255), Table(shifts >> 8 & 255), Table(shifts >> 16 & 255), Table(shifts >> 24)} {
    if (__builtin_expect((shifts & (kZeros | kNaNs) * 0x01010101) == 0, 1)) return;
#pragma unroll
    for (uint32_t g = 0; g < kGroupsOfBlock; ++g) {
      const uint32_t shift = shifts >> g * 8 & 255;
      if (shift >= kNaNs) of[g].low = of[g].high = shift == kZeros ? 0 : 0x7f7f7f7f;
    }
  }
};

// Writes a round's values to the lane's address `to`.
DEVICE void store_values(const ptx::Uint4 (&packed)[2], const Table& first, const Table& second, uint32_t to) {
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t codes[4] = {packed[i].x, packed[i].y, packed[i].z, packed[i].w};
#pragma unroll
    for (uint32_t part = 0; part < 2; ++part) {
      const ptx::Uint2 low = e4m3_of_eight(codes[part * 2], i == 0 ? first : second);
      const ptx::Uint2 high = e4m3_of_eight(codes[part * 2 + 1], i == 0 ? first : second);
      ptx::st_shared_v4_b32(to ^ (i * 2 + part) * 16, low.x, low.y, high.x, high.y);
    }
  }
}

// Converts all slots of a tile.
template <typename Storage>
DEVICE void convert_tile(const Params& p, Storage& shared, uint32_t warp, bool& is_turn, const Tile& tile, RingPosition& at) {
  const uint32_t lane = ptx::lane_index(), row = lane / 2, half = lane % 2;
  const uint32_t first_b = ptx::smem_address(shared.b[0]) + warp * (32 * kBlockK);
  const uint32_t first_from = first_b + row * (kBlockK / 2) + ((half * 2 ^ row / 2 % 4) * 16);
  const uint32_t first_to = first_b + row * kBlockK + ((half * 4 ^ row % 8) * 16);
  const uint32_t first_shifts = ptx::smem_address(&shared.roles.shifts[0][warp * 32 + row]) + half * 2;
  const KBlocks k_blocks = k_blocks_of(p, tile);
#pragma unroll 1
  for (uint32_t k_block = k_blocks.first; k_block < k_blocks.end; ++k_block, at = at.next()) {
    if (kConvertGroups == 2 && (is_turn = !is_turn)) continue;
    // With an odd number of stages, a converting warpgroup has each slot every other round. Rounds r and r - 2 have the
    // same parity, so it waits until math warps have freed the slot of round r - 1: it must not take round r - 2 for r.
    if constexpr (kNumStages % kConvertGroups != 0) wait_until_free(shared.ring, at);
    ptx::mbarrier_wait_parity(&shared.roles.packed[at.stage], at.parity);
    const uint32_t shifts_at = first_shifts + at.stage * (kBlockN * 4), from = first_from + at.stage * kBBytes;
    const uint32_t shifts = ptx::ld_shared_u16(shifts_at) | ptx::ld_shared_u16(shifts_at + kRowsOfRound * 4) << 16;
    ptx::Uint4 packed[2][2];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      packed[i / 2][i % 2] = ptx::ld_shared_v4_b32((from ^ i % 2 * 16) + i / 2 * (kRowsOfRound * kBlockK / 2));
    ptx::syncwarp();  // all lanes must have read before a lane overwrites
    const uint32_t to = first_to + at.stage * kBBytes;
    const Tables tables(shifts);
    store_values(packed[0], tables.of[0], tables.of[1], to);
    store_values(packed[1], tables.of[2], tables.of[3], to + kRowsOfRound * kBlockK);
    ptx::fence_proxy_async_shared();
    ptx::syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.ring.full[at.stage]);
  }
}

// The role of the converting warpgroups: if there are two, they convert slots in turn.
template <typename Storage>
DEVICE void convert_tiles(const Params& p, Storage& shared, Tiles& tiles, uint32_t group) {
  ptx::setmaxnreg_dec<kConvertRegisters>();
  const uint32_t warp = ptx::warp_index() % 4;
  if (warp >= kConvertWarps) return;
  Passes passes(shared.roles);
  RingPosition at;
  bool is_turn = group == 0;  // true if the other warpgroup converts the previous slot
  for (Tile tile; tiles.next(tile);) do
      convert_tile(p, shared, warp, is_turn, tile, at);
    while (passes.template again<true>());
}
