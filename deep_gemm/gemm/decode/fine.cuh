// B in E4M3, where a scale of A or of B has less than 128 columns, or one of B less than 128 rows.
//
//   scales of kScaleBlocks k-blocks             --> shared memory: of tokens and of rows of B, apart
//   a part of a k-block, as deep as the shallower scale  --> WGMMA, from zero
//   total = fma(partial, sfa * sfb, total), the parts in order
#pragma once
#include "config.cuh"
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "e4m3_of_e2m1.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

constexpr uint32_t kDepth = kColumnsOfA < kColumnsOfB ? kColumnsOfA : kColumnsOfB;
constexpr uint32_t kParts = kBlockK / kDepth, kPartsOfA = kBlockK / kColumnsOfA, kPartsOfB = kBlockK / kColumnsOfB;
constexpr uint32_t kNumWarpgroups = kNumMathWarps / 4;
// Scales that a warpgroup's 64 rows of B have, and of these a thread's two rows, which are 8 apart.
constexpr uint32_t kScalesOfRows = kRowsOfB < 64 ? 64 / kRowsOfB : 1, kScalesOfThread = kRowsOfB == 1 ? 2 : 1;
// What is loaded of B's scales at a time: one, or a word with those of a k-block.
constexpr uint32_t kColumnsOfLoad = kScalesAreWords ? kBlockK : kColumnsOfB, kLoadsOfBlock = kBlockK / kColumnsOfLoad;
// Loads along k by lanes beside each other: scales of a row lie beside each other, words of rows do.
constexpr uint32_t kLoadsTogether = kScalesAreWords ? 1 : 8;
constexpr uint32_t kLoadsOfRows = kScaleBlocks * kLoadsOfBlock * kScalesOfRows;
constexpr uint32_t kScalesOfTokens = kScaleBlocks * kPartsOfA * kBlockTokens;
constexpr uint32_t kRowsPerThread = ceil_div(kLoadsOfRows, 128), kTokensPerThread = ceil_div(kScalesOfTokens, kNumMathThreads);

static_assert(kSlotBlocks == 1 && kNumPartials <= kParts, "a k-block at a time, in parts");
static_assert(!kScalesAreWords || kPartsOfB == 4, "a word has the scales of a k-block");
static_assert(kScaleBlocks * kLoadsOfBlock % kLoadsTogether == 0, "whole sets of loads");

struct ScaleStorage {
  alignas(16) float tokens[kScaleBlocks][kPartsOfA][kBlockTokens];
  alignas(16) float rows[kNumWarpgroups][kScaleBlocks][kScalesOfRows][kPartsOfB];
};

// The scales of kScaleBlocks k-blocks, on their way to shared memory. A warpgroup brings those of its rows, all together those of
// the tokens. What is past the last row, token or column is loaded again from the last one: never an address outside.
struct Scales {
  uint32_t rows[kRowsPerThread];
  float tokens[kTokensPerThread];

  // Which of the warpgroup's loads of B's scales is this thread's i-th.
  struct Place {
    uint32_t index, row, load;

    DEVICE explicit Place(uint32_t i)
        : index(i * 128 + ptx::thread_index() % 128),
          row(index / kLoadsTogether % kScalesOfRows),
          load(index / (kLoadsTogether * kScalesOfRows) * kLoadsTogether + index % kLoadsTogether) {}
  };

  DEVICE void load(const DecodeProduct& p, const Work& work, uint32_t first_k_block) {
    const uint32_t end_k = work.end_k_block * kBlockK < p.k ? work.end_k_block * kBlockK : p.k;
    const auto along_k = [&](uint32_t i, uint32_t columns) {
      const uint32_t k = first_k_block * kBlockK + i * columns;
      return static_cast<uint64_t>((k < end_k ? k : end_k - 1) / columns);
    };
    const uint32_t first_row = (work.row_n + ptx::warp_index() / 4 * 64) / kRowsOfB, last_row = (p.n - 1) / kRowsOfB;
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerThread; ++i) {
      const Place place(i);
      const uint32_t row = first_row + place.row < last_row ? first_row + place.row : last_row;
      rows[i] = ptx::ld_global_b32(p.sfb + static_cast<uint64_t>(row) * p.sfb_stride_n +
                                   along_k(place.load, kColumnsOfLoad) * p.sfb_stride_k);
    }
#pragma unroll
    for (uint32_t i = 0; i < kTokensPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      const uint32_t token = work.row_m + index % kBlockTokens;
      tokens[i] = ptx::ld_global_f32(p.sfa + static_cast<uint64_t>(token < p.m ? token : p.m - 1) * p.sfa_stride_m +
                                     along_k(index / kBlockTokens, kColumnsOfA) * p.sfa_stride_k);
    }
  }

  DEVICE void store(ScaleStorage& to) const {
    const uint32_t warpgroup = ptx::warp_index() / 4;
#pragma unroll
    for (uint32_t i = 0; i < kRowsPerThread; ++i) {
      const Place place(i);
      if (kLoadsOfRows % 128 != 0 && place.index >= kLoadsOfRows) break;
      const uint32_t k_block = place.load / kLoadsOfBlock;
      float* scales = to.rows[warpgroup][k_block][place.row];
      if constexpr (kScalesAreWords) {
        const auto scale = [&](uint32_t part) { return bits_of_scale(rows[i] >> part * 8 & 255); };
        ptx::st_shared_v4_b32(scales, scale(0), scale(1), scale(2), scale(3));
      } else {
        ptx::st_shared_b32(scales + place.load % kLoadsOfBlock, rows[i]);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kTokensPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      if (kScalesOfTokens % kNumMathThreads == 0 || index < kScalesOfTokens)
        ptx::st_shared_f32(&to.tokens[0][0][0] + index, tokens[i]);
    }
  }
};

// What a thread's rows of B are scaled by in a k-block.
struct RowScales {
  float of[kScalesOfThread][kPartsOfB];

  DEVICE explicit RowScales(const float (&rows)[kScalesOfRows][kPartsOfB]) {
    const uint32_t row = ptx::warp_index() % 4 * 16 + (kRowsOfB == 1 ? ptx::lane_index() / 4 : 0);
#pragma unroll
    for (uint32_t i = 0; i < kScalesOfThread; ++i) {
      const float* scales = rows[kRowsOfB < 64 ? row / kRowsOfB + i * 8 : 0];
      if constexpr (kPartsOfB == 4) {
        const ptx::Float4 four = ptx::ld_shared_v4_f32(scales);
        of[i][0] = four.x, of[i][1] = four.y, of[i][2] = four.z, of[i][3] = four.w;
      } else if constexpr (kPartsOfB == 2) {
        const ptx::Float2 two = ptx::ld_shared_v2_f32(scales);
        of[i][0] = two.x, of[i][1] = two.y;
      } else {
        of[i][0] = ptx::ld_shared_f32(scales);
      }
    }
  }
};

using Partials = float[kNumPartials][kAccumulators];

// One k-block: where B and A are in its slot, as descriptors' low words, and its scales.
struct KBlock {
  uint32_t b_low, a_low;
  uint32_t depth;  // that is left of k, from this k-block on
  const float (&tokens)[kPartsOfA][kBlockTokens];
  RowScales rows;

  DEVICE void issue(float (&partial)[kAccumulators], uint32_t part) const {
    ptx::fence_registers(partial);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t k = part * kDepth; k < (part + 1) * kDepth; k += 32)
      ptx::wgmma_m64k32_e4m3<kBlockTokens>(partial, ptx::smem_descriptor_from_low(b_low + k / 16),
                                           ptx::smem_descriptor_from_low(a_low + k / 16), k != part * kDepth);
    ptx::wgmma_commit_group();
  }

  // Promotes this part and those behind it. `done` is called when the tensor cores are done with the slot.
  template <uint32_t kPart, typename Done>
  DEVICE void promote(float (&total)[kAccumulators], Partials& partials, const Done& done) const {
    if constexpr (kPart < kParts) {
      constexpr uint32_t kPartOfA = kPart * kDepth / kColumnsOfA, kPartOfB = kPart * kDepth / kColumnsOfB;
      constexpr uint32_t kIssued = kPart + kNumPartials < kParts ? kNumPartials : kParts - kPart;
      float(&partial)[kAccumulators] = partials[kPart % kNumPartials];
      ptx::Float2 scales[kBlockTokens / 8];  // loaded while the tensor cores work
#pragma unroll
      for (uint32_t g = 0; g < kBlockTokens / 8; ++g)
        scales[g] = ptx::ld_shared_v2_f32(&tokens[kPartOfA][g * 8 + ptx::lane_index() % 4 * 2]);
      ptx::fence_registers(partial);
      ptx::wgmma_wait_group<kIssued - 1>();
      if constexpr (kPart + 1 == kParts) done();
      // No scale is behind the last column of k. What is there instead may be infinite, and would make NaN of zeros.
      if (kPart == 0 || kPart * kDepth < depth) {
#pragma unroll
        for (uint32_t j = 0; j < kAccumulators; ++j) {
          const float sfa = j % 2 ? scales[j / 4].y : scales[j / 4].x;
          total[j] = ptx::fma(partial[j], sfa * rows.of[j / 2 % kScalesOfThread][kPartOfB], total[j]);
        }
      }
      if constexpr (kPart + kNumPartials < kParts) issue(partial, kPart + kNumPartials);
      promote<kPart + 1>(total, partials, done);
    }
  }
};

// Multiplies this CTA's k-blocks.
template <typename Storage>
DEVICE void multiply(const DecodeProduct& p, Storage& shared, const Work& work, RingPosition& at,
                     float (&total)[kAccumulators]) {
  const uint32_t warpgroup = ptx::warp_index() / 4;
  const uint32_t b_low = ptx::smem_descriptor_low(ptx::smem_address(shared.b) + warpgroup * 64 * kBlockK);
  const uint32_t a_low = ptx::smem_descriptor_low(ptx::smem_address(shared.a));
#pragma unroll
  for (float& x : total) x = 0;
  Scales scales;
  if (work.k_block < work.end_k_block) scales.load(p, work, work.k_block);
  for (uint32_t first = work.k_block; first < work.end_k_block; first += kScaleBlocks) {
    ptx::bar_sync(1, kNumMathThreads);  // everybody is done with the scales before
    scales.store(shared.scales);
    ptx::bar_sync(1, kNumMathThreads);
    if (first + kScaleBlocks < work.end_k_block) scales.load(p, work, first + kScaleBlocks);
    const uint32_t count = work.end_k_block - first < kScaleBlocks ? work.end_k_block - first : kScaleBlocks;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i, at = at.next()) {
      const KBlock k_block = {b_low + at.stage * (kBBytes / 16), a_low + at.stage * (kABytes / 16), p.k - (first + i) * kBlockK,
                              shared.scales.tokens[i], RowScales(shared.scales.rows[warpgroup][i])};
      Partials partials;
      wait_until_loaded(shared.ring, at);
#pragma unroll
      for (uint32_t part = 0; part < kNumPartials; ++part) k_block.issue(partials[part], part);
      k_block.promote<0>(total, partials, [&] { release(shared.ring, at, ptx::lane_index()); });
    }
  }
}
