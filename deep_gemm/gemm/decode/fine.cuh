// B in E4M3, if a scale of A or of B covers fewer than 128 columns, or a scale of B fewer than 128 rows.
//
//   scales of kScaleBlocks k-blocks, or words    --> shared memory, as numbers: of tokens, and of rows of B
//   a part of a k-block, as deep as the shallower scale  --> WGMMA, from zero
//   total = fma(partial, sfa * sfb, total), the parts in order
#pragma once
#include "config.cuh"
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

constexpr uint32_t kDepth = kColumnsOfA < kColumnsOfB ? kColumnsOfA : kColumnsOfB;
constexpr uint32_t kParts = kBlockK / kDepth, kPartsOfA = kBlockK / kColumnsOfA, kPartsOfB = kBlockK / kColumnsOfB;
constexpr uint32_t kNumWarpgroups = kNumMathWarps / 4;
// Scales for a warpgroup's 64 rows of B, and for a thread's two rows among them, which are 8 apart.
constexpr uint32_t kScalesOfRows = kRowsOfB < 64 ? 64 / kRowsOfB : 1, kScalesOfThread = kRowsOfB == 1 ? 2 : 1;
constexpr uint32_t kScalesOfTokens = kScaleBlocks * kPartsOfA * kBlockTokens;
constexpr uint32_t kTokensPerThread = ceil_div(kScalesOfTokens, kNumMathThreads);

static_assert(kSlotBlocks == 1 && kNumPartials <= kParts, "a k-block at a time, in parts");

struct ScaleStorage {
  alignas(16) float tokens[kScaleBlocks][kPartsOfA][kBlockTokens];
  alignas(16) float rows[kNumWarpgroups][kScaleBlocks][kScalesOfRows][kPartsOfB];
};

// A thread's i-th load among its warpgroup's loads of B's scales: one scale, or a word with a k-block's scales.
template <bool kAreWords>
struct RowLoad {
  static constexpr uint32_t kOfBlock = kAreWords ? 1 : kPartsOfB;
  // Neighbouring lanes load along k, because a row's scales are contiguous. Words are contiguous along rows instead.
  static constexpr uint32_t kTogether = kAreWords ? 1 : 8;
  static constexpr uint32_t kCount = kScaleBlocks * kOfBlock * kScalesOfRows, kPerThread = ceil_div(kCount, 128);
  static_assert(kScaleBlocks * kOfBlock % kTogether == 0, "whole sets of loads");
  uint32_t index, row, along_k;

  DEVICE explicit RowLoad(uint32_t i)
      : index(i * 128 + ptx::thread_index() % 128),
        row(index / kTogether % kScalesOfRows),
        along_k(index / (kTogether * kScalesOfRows) * kTogether + index % kTogether) {}
};

// The scales of kScaleBlocks k-blocks, or words with them, in registers between global and shared memory. A warpgroup
// loads its rows' scales; all warpgroups together load the tokens' scales. Indices past the last row, token or column
// load the last one's scale again, so that no address is outside.
struct Scales {
  uint32_t rows[RowLoad<false>::kPerThread], tokens[kTokensPerThread];

  DEVICE void load(const DecodeProduct& p, const Work& work, uint32_t first_k_block) {
    const uint32_t end_k = work.end_k_block * kBlockK < p.k ? work.end_k_block * kBlockK : p.k;
    const auto along_k = [&](uint32_t i, uint32_t columns) {
      const uint32_t k = first_k_block * kBlockK + i * columns;
      return k < end_k ? k : end_k - 1;
    };
    if (p.words & kWordsOfB) load_rows<true>(p, work, along_k); else load_rows<false>(p, work, along_k);
    const uint32_t scales_of_load = p.words & kWordsOfA ? 4 : 1;
#pragma unroll
    for (uint32_t i = 0; i < kTokensPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      const uint32_t token = work.row_m + index % kBlockTokens;
      const uint32_t scale = along_k(index / kBlockTokens, kColumnsOfA) / kColumnsOfA;
      tokens[i] = ptx::ld_global_b32(p.sfa + static_cast<uint64_t>(token < p.m ? token : p.m - 1) * p.sfa_stride_m +
                                     static_cast<uint64_t>(scale / scales_of_load) * p.sfa_stride_k);
    }
  }

  template <bool kAreWords, typename AlongK>
  DEVICE void load_rows(const DecodeProduct& p, const Work& work, const AlongK& along_k) {
    using Load = RowLoad<kAreWords>;
    const uint32_t first_row = (work.row_n + ptx::warp_index() / 4 * 64) / kRowsOfB, last_row = (p.n - 1) / kRowsOfB;
#pragma unroll
    for (uint32_t i = 0; i < Load::kPerThread; ++i) {
      const Load load(i);
      const uint32_t row = first_row + load.row < last_row ? first_row + load.row : last_row;
      const uint32_t at_k = along_k(load.along_k, kBlockK / Load::kOfBlock) / (kColumnsOfB * (kAreWords ? 4 : 1));
      rows[i] = ptx::ld_global_b32(p.sfb + static_cast<uint64_t>(row) * p.sfb_stride_n +
                                   static_cast<uint64_t>(at_k) * p.sfb_stride_k);
    }
  }

  // Stores the loaded scales, which begin at `first_k_block`.
  DEVICE void store(const DecodeProduct& p, uint32_t first_k_block, ScaleStorage& to) const {
    if (p.words & kWordsOfB) store_rows<true>(first_k_block, to); else store_rows<false>(first_k_block, to);
    const bool are_words = p.words & kWordsOfA;
#pragma unroll
    for (uint32_t i = 0; i < kTokensPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      const uint32_t place = first_k_block * kPartsOfA + index / kBlockTokens;
      if (kScalesOfTokens % kNumMathThreads == 0 || index < kScalesOfTokens)
        ptx::st_shared_b32(&to.tokens[0][0][0] + index, are_words ? bits_of_scale_at(place, tokens[i]) : tokens[i]);
    }
  }

  template <bool kAreWords>
  DEVICE void store_rows(uint32_t first_k_block, ScaleStorage& to) const {
    using Load = RowLoad<kAreWords>;
    const uint32_t warpgroup = ptx::warp_index() / 4;
#pragma unroll
    for (uint32_t i = 0; i < Load::kPerThread; ++i) {
      const Load load(i);
      if (Load::kCount % 128 != 0 && load.index >= Load::kCount) break;
      const uint32_t k_block = load.along_k / Load::kOfBlock;
      float* const scales = to.rows[warpgroup][k_block][load.row];
      if constexpr (kAreWords) {
        const auto scale = [&](uint32_t part) { return bits_of_scale_at((first_k_block + k_block) * kPartsOfB + part, rows[i]); };
        if constexpr (kPartsOfB == 4)
          ptx::st_shared_v4_b32(scales, scale(0), scale(1), scale(2), scale(3));
        else if constexpr (kPartsOfB == 2)
          ptx::st_shared_v2_b32(scales, scale(0), scale(1));
        else
          ptx::st_shared_b32(scales, scale(0));
      } else {
        ptx::st_shared_b32(scales + load.along_k % Load::kOfBlock, rows[i]);
      }
    }
  }
};

// Scales of a thread's rows of B for one k-block.
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

// One k-block: descriptors' low words for its B and A in the slot, and its scales.
struct KBlock {
  uint32_t b_low, a_low;
  uint32_t depth;  // values of k from this k-block to the end
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

  // Promotes this part and all later parts. Calls `done` when the tensor cores no longer need the slot.
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
      // Past the last column of k there are no scales. A value loaded there may be infinite, and make zeros NaN.
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
  multiply_with_scales<Scales, kScaleBlocks>(p, shared, work, total, [&](uint32_t first, uint32_t count) {
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
  });
}
