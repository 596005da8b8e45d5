// B is MXFP4: two E2M1 values in a byte, and a scale 2^s for each 32 values of a row.
//
//   two k-blocks of B, in shared memory: rows of 128 bytes, swizzled
//     16 bits for each lane and half of a group of 32        --> four E4M3 values of its fragment, by a table of the group's scale
//     fragments of 64 x 32, in registers, x tokens            --> WGMMA, four to a k-block
//
// A row's scales in a k-block fold into the exponents of its E4M3 values if they are at most 2^11 apart. The math warps
// check this when they copy scales to shared memory. If the scales of one row do not fold, its warpgroup multiplies all
// groups of the k-block one by one, each from zero.
#pragma once
#include "config.cuh"
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "e4m3_of_e2m1.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

// Sets of partial sums that fit in a thread's registers: with two, one is multiplied while the other is promoted.
constexpr uint32_t kNumPartials = kBlockTokens <= 32 ? 2 : 1;
// k-blocks whose scales are in shared memory at a time.
constexpr uint32_t kScaleBlocks = 16;
constexpr uint32_t kNumWarpgroups = kNumMathWarps / 4;
constexpr uint32_t kScalesOfTokens = kScaleBlocks * kBlockTokens;
constexpr uint32_t kRowsPerThread = kScaleBlocks * 64 / 128, kTokensPerThread = ceil_div(kScalesOfTokens, kNumMathThreads);

static_assert(kSlotBlocks == 2 && kScaleBlocks % 2 == 0, "a row of a slot is two k-blocks");

struct ScaleStorage {
  // Two words for each row of B in a k-block. If its scales fold: a byte for each 32 values, which holds their shift
  // plus 5, and the factor of the row's sum. If they do not fold: the row's four scales, and zero.
  alignas(16) ptx::Uint2 rows[kNumWarpgroups][kScaleBlocks][64];
  float tokens[kScaleBlocks][kBlockTokens];
  // Whether rows fold, for each 32 rows of a warpgroup.
  alignas(16) uint32_t fold[kNumWarpgroups][kScaleBlocks][2];
};

// The two words in ScaleStorage for a row whose scales are the bytes of `word`.
DEVICE ptx::Uint2 folded(uint32_t word, bool& folds) {
  uint32_t least = 255, most = 0;
#pragma unroll
  for (uint32_t g = 0; g < kGroupsOfBlock; ++g) {
    const uint32_t s = word >> g * 8 & 255;
    least = s < least ? s : least, most = s > most ? s : most;
  }
  folds = most - least < kShifts || most == 255;
  if (!folds) return {word, 0};
  if (most == 255) return {0, bits_of_scale(255)};  // the product is NaN for any values
  const uint32_t shifts = word + (kShifts - 1) * 0x01010101 - most * 0x01010101;  // no byte borrows from the next byte
  return {shifts, bits_of_factor(most)};
}

// Scales of kScaleBlocks k-blocks, loaded into registers and stored to shared memory. A warpgroup loads its rows' scales;
// all load the tokens' scales. Past the last row, token or k-block, the last scale is loaded again: no load is outside.
struct Scales {
  uint32_t rows[kRowsPerThread];
  float tokens[kTokensPerThread];

  DEVICE void load(const DecodeProduct& p, const Work& work, uint32_t first_k_block) {
    const auto k_block = [&](uint32_t i) {
      return first_k_block + i < work.end_k_block ? first_k_block + i : work.end_k_block - 1;
    };
    const uint32_t thread = ptx::thread_index() % 128;
    const uint32_t row = work.row_n + ptx::warp_index() / 4 * 64 + thread % 64;
    const uint32_t* of_row = reinterpret_cast<const uint32_t*>(p.sfb) +
                             static_cast<uint64_t>(row < p.n ? row : p.n - 1) * p.sfb_stride_n;
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerThread; ++i) {
      const uint32_t at = k_block(i * 2 + thread / 64);
      rows[i] = ptx::ld_global_b32(of_row + static_cast<uint64_t>(at) * p.sfb_stride_k);
      rows[i] = scales_within(rows[i], (p.k - at * kBlockK) / 32);
    }
#pragma unroll
    for (uint32_t i = 0; i < kTokensPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      const uint32_t token = work.row_m + index % kBlockTokens;
      tokens[i] = ptx::ld_global_f32(p.sfa + static_cast<uint64_t>(token < p.m ? token : p.m - 1) * p.sfa_stride_m +
                                     static_cast<uint64_t>(k_block(index / kBlockTokens)) * p.sfa_stride_k);
    }
  }

  DEVICE void store(const DecodeProduct&, uint32_t, ScaleStorage& to) const {
    const uint32_t thread = ptx::thread_index() % 128, group = ptx::warp_index() / 4;
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerThread; ++i) {
      bool folds;
      const ptx::Uint2 row = folded(rows[i], folds);
      ptx::st_shared_v2_b32(&to.rows[group][i * 2 + thread / 64][thread % 64], row.x, row.y);
      const bool all_fold = ptx::all_sync(folds);
      if (ptx::lane_index() == 0) ptx::st_shared_b32(&to.fold[group][i * 2 + thread / 64][thread / 32 % 2], all_fold);
    }
#pragma unroll
    for (uint32_t i = 0; i < kTokensPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      if (kScalesOfTokens % kNumMathThreads == 0 || index < kScalesOfTokens)
        ptx::st_shared_f32(&to.tokens[0][0] + index, tokens[i]);
    }
  }
};

// ---- From E2M1 to E4M3

// A thread's fragment of 64 rows of B, 32 deep: its warp's rows lane / 4 and lane / 4 + 8, 4 values from 4 * (lane % 4)
// on, and 4 values 16 further. (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32".) `chunk` counts 16 bytes.
DEVICE void load_fragment(uint32_t (&fragment)[4], uint32_t b, uint32_t chunk, const Table (&tables)[2]) {
  const uint32_t lane = ptx::lane_index();
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t at = b + i * 8 * kBlockK + ((chunk ^ lane / 4) * 16) + lane % 4 * 2;  // swizzled by the row in its atom
    fragment[i] = e4m3_of(ptx::ld_shared_u16(at), tables[i]);
    fragment[i + 2] = e4m3_of(ptx::ld_shared_u16(at + 8), tables[i]);
  }
}

// ---- One k-block: `b` is the address of the thread's first row in the slot; there the k-block begins at 16 * `first`

using Fragments = uint32_t[4 * kGroupsOfBlock];

DEVICE void load_fragments(Fragments& fragments, uint32_t b, uint32_t first, const ptx::Uint2 (&rows)[2]) {
#pragma unroll
  for (uint32_t g = 0; g < kGroupsOfBlock; ++g) {
    const Table tables[2] = {Table(rows[0].x >> g * 8 & 255), Table(rows[1].x >> g * 8 & 255)};
    load_fragment(reinterpret_cast<uint32_t(&)[4]>(fragments[4 * g]), b, first + g, tables);
  }
}

DEVICE void issue(float (&partial)[kAccumulators], const Fragments& fragments, uint32_t a_low) {
  ptx::fence_registers(partial);
  ptx::wgmma_fence();
  ptx::wgmma_registers_m64k128_e4m3<kBlockTokens>(partial, fragments, a_low);
  ptx::wgmma_commit_group();
}

// If scales do not fold: sums each group's products from zero, and adds these sums in order.
DEVICE void multiply_groups(float (&partial)[kAccumulators], uint32_t b, uint32_t first, uint32_t a_low,
                            const ptx::Uint2 (&rows)[2]) {
#pragma unroll
  for (float& x : partial) x = 0;
#pragma unroll 1
  for (uint32_t g = ptx::opaque(0u); g < kGroupsOfBlock; ++g) {  // opaque: else the compiler peels the first iteration
    const auto folds = [&](uint32_t i) { return rows[i].y != 0; };
    const auto byte = [&](uint32_t i) { return rows[i].x >> g * 8 & 255; };
    const auto table = [&](uint32_t i) { return Table(folds(i) ? byte(i) : kShiftOfOne); };
    const auto scale = [&](uint32_t i) { return ptx::float_of(folds(i) ? rows[i].y : bits_of_scale(byte(i))); };
    const Table tables[2] = {table(0), table(1)};
    const float scales[2] = {scale(0), scale(1)};
    uint32_t fragment[4];
    load_fragment(fragment, b, first + g, tables);
    float of_group[kAccumulators];
    ptx::fence_registers(of_group);
    ptx::wgmma_fence();
    ptx::wgmma_registers_m64k32_e4m3<kBlockTokens>(of_group, fragment, a_low + g * 2);
    ptx::wgmma_commit_group();
    ptx::fence_registers(of_group);
    ptx::wgmma_wait_group<0>();
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; ++i) partial[i] = ptx::fma(of_group[i], scales[i / 2 % 2], partial[i]);
  }
}

// total += partial * scales of the tokens
DEVICE void promote(float (&total)[kAccumulators], const float (&partial)[kAccumulators], const float (&tokens)[kBlockTokens]) {
#pragma unroll
  for (uint32_t g = 0; g < kBlockTokens / 8; ++g) {
    const ptx::Float2 scale = ptx::ld_shared_v2_f32(&tokens[g * 8 + ptx::lane_index() % 4 * 2]);
#pragma unroll
    for (uint32_t j = g * 4; j < g * 4 + 4; ++j) total[j] = ptx::fma(partial[j], j % 2 ? scale.y : scale.x, total[j]);
  }
}

DEVICE void scale_rows(float (&partial)[kAccumulators], const ptx::Uint2 (&rows)[2]) {
#pragma unroll
  for (uint32_t i = 0; i < kAccumulators; ++i) partial[i] *= ptx::float_of(rows[i / 2 % 2].y);
}

// Multiplies this CTA's k-blocks, two to a slot.
template <typename Storage>
DEVICE void multiply(const DecodeProduct& p, Storage& shared, const Work& work, RingPosition& at, float (&total)[kAccumulators]) {
  const uint32_t warpgroup = ptx::warp_index() / 4, lane = ptx::lane_index();
  const uint32_t row = ptx::warp_index() % 4 * 16 + lane / 4;
  const uint32_t first_b = ptx::smem_address(shared.b) + (warpgroup * 64 + row) * kBlockK;
  const uint32_t first_a = ptx::smem_descriptor_low(ptx::smem_address(shared.a));
  multiply_with_scales<Scales, kScaleBlocks>(p, shared, work, total, [&](uint32_t, uint32_t count) {
#pragma unroll 1
    for (uint32_t i = 0; i < count; i += kSlotBlocks, at = at.next()) {
      const auto row_of = [&](uint32_t block, uint32_t r) { return ptx::ld_shared_v2_b32(&shared.scales.rows[warpgroup][i + block][r]); };
      const ptx::Uint4 fold = ptx::ld_shared_v4_b32(shared.scales.fold[warpgroup][i]);
      const uint32_t b = first_b + at.stage * kBBytes, a = first_a + at.stage * (kSlotBlocks * kABytes / 16);
      wait_until_loaded(shared.ring, at);
      if (__builtin_expect(ptx::all_sync((fold.x & fold.y & fold.z & fold.w) != 0 && i + 1 < count), 1)) {
        const ptx::Uint2 rows[kSlotBlocks][2] = {{row_of(0, row), row_of(0, row + 8)}, {row_of(1, row), row_of(1, row + 8)}};
        float partial[kNumPartials][kAccumulators];
        Fragments fragments[kSlotBlocks];
        load_fragments(fragments[0], b, 0, rows[0]);
        issue(partial[0], fragments[0], a);
        load_fragments(fragments[1], b, kGroupsOfBlock, rows[1]);
        if constexpr (kNumPartials == 2) issue(partial[1], fragments[1], a + kABytes / 16);
        ptx::wgmma_wait_group<kNumPartials - 1>();
        scale_rows(partial[0], rows[0]);
        promote(total, partial[0], shared.scales.tokens[i]);
        if constexpr (kNumPartials == 1) issue(partial[0], fragments[1], a + kABytes / 16);
        ptx::fence_registers(partial[kNumPartials - 1]);
        ptx::wgmma_wait_group<0>();
        release(shared.ring, at, lane);
        scale_rows(partial[kNumPartials - 1], rows[1]);
        promote(total, partial[kNumPartials - 1], shared.scales.tokens[i + 1]);
      } else {
#pragma unroll 1
        for (uint32_t block = 0; block < kSlotBlocks && i + block < count; ++block) {
          const ptx::Uint2 rows[2] = {row_of(block, row), row_of(block, row + 8)};
          float partial[kAccumulators];
          const uint32_t of_block = a + block * (kABytes / 16);
          const ptx::Uint2 fold_of_block = ptx::ld_shared_v2_b32(shared.scales.fold[warpgroup][i + block]);
          if (ptx::all_sync((fold_of_block.x & fold_of_block.y) != 0)) {  // all rows of this k-block fold
            Fragments fragments;
            load_fragments(fragments, b, block * kGroupsOfBlock, rows);
            issue(partial, fragments, of_block);
            ptx::fence_registers(partial);
            ptx::wgmma_wait_group<0>();
            scale_rows(partial, rows);
          } else {
            multiply_groups(partial, b, block * kGroupsOfBlock, of_block, rows);
          }
          promote(total, partial, shared.scales.tokens[i + block]);
        }
        ptx::syncwarp();
        release(shared.ring, at, lane);
      }
    }
  });
}
