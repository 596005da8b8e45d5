// B needs no conversion. Its scales cover blocks smaller than 128 x 128: too many scales for the math warps to keep.
// The producer's last warp writes the scales of a k-block into the slot, after A's scales:
//
//   [parts of the k-block][chunks of a tile's columns], and whether each chunk has one scale for all parts
//
// and arrives at the slot's barrier. It loads the scales of a batch of k-blocks at a time, one batch ahead. It converts
// words to numbers only when it uses them; each lane loads a word, and four lanes load the same word.
#pragma once
#include "config.cuh"
#include "convert/as_it_lies.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "types.cuh"
#include WORK

constexpr uint32_t kChunks = kBlockN / kScaleRowsOfB;
// k-blocks of a batch: for each chunk, a lane has the scale of one part of one k-block.
constexpr uint32_t kBlocksOfBatch = 32 / kScalePartsOfB;
static_assert(kChunks == 2 || kChunks == 4, "the scales of a part are stored at once");

struct LaneScales {
  const float* rows[kChunks];  // for each chunk of the tile, the first scale of its block
  uint32_t coming[kChunks];
  const bool are_words;

  // Scales past the end of k are zero, like the values there; words there have exponents of zero. Columns of a tile
  // past n use the last block's scale.
  DEVICE void ask(const Params& p, uint32_t first_k_block) {
    const uint32_t part = first_k_block * kScalePartsOfB + ptx::lane_index();
    const bool is_there = part < ceil_div(p.k, kBlockK / kScalePartsOfB);
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i)
      coming[i] = is_there ? ptx::ld_global_nc_b32(rows[i] + static_cast<uint64_t>(are_words ? part / 4 : part) * p.sfb_stride_k) : 0;
  }

  // Returns the scale of chunk i that `ask` has loaded for this lane, whose part of k is number `part` from k's start.
  DEVICE uint32_t taken(uint32_t i, uint32_t part) const { return are_words ? bits_of_scale_at(part, coming[i]) : coming[i]; }

  DEVICE LaneScales(const Params& p, const Tile& tile) : are_words(p.words & kWordsOfB) {
    const uint32_t last = (p.n - 1) / kScaleRowsOfB;
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
      const uint32_t block = tile.row_n / kScaleRowsOfB + i;
      rows[i] = sfb_of(p, tile) + static_cast<uint64_t>(block < last ? block : last) * p.sfb_stride_n;
    }
  }
};

// The role of the producer's last warp.
template <typename Storage>
DEVICE void scale_tiles(const Params& p, Storage& shared, Tiles& tiles, uint32_t) {
  const uint32_t block_of_lane = ptx::lane_index() / kScalePartsOfB, part = ptx::lane_index() % kScalePartsOfB;
  RingPosition at;
  for (Tile tile; tiles.next(tile);) {
    const KBlocks k_blocks = k_blocks_of(p, tile);
    LaneScales scales(p, tile);
    scales.ask(p, k_blocks.first);
#pragma unroll 1
    for (uint32_t first = k_blocks.first; first < k_blocks.end; first += kBlocksOfBatch) {
      uint32_t current[kChunks];
      bool folds = true;  // false if a scale differs from the first part's, unless it is past the end of k
#pragma unroll
      for (uint32_t i = 0; i < kChunks; ++i) {
        current[i] = scales.taken(i, first * kScalePartsOfB + ptx::lane_index());
        folds &= current[i] == ptx::shfl_sync(current[i], ptx::lane_index() - part);
      }
      folds |= (first * kScalePartsOfB + ptx::lane_index()) * (kBlockK / kScalePartsOfB) >= p.k;
      const uint32_t folding = ptx::ballot_sync(folds);
      scales.ask(p, first + kBlocksOfBatch);
      const uint32_t count = k_blocks.end - first < kBlocksOfBatch ? k_blocks.end - first : kBlocksOfBatch;
#pragma unroll 1
      for (uint32_t i = 0; i < count; ++i, at = at.next()) {
        constexpr uint32_t kAll = (1 << kScalePartsOfB) - 1;
        float* const to = &shared.scales[at.stage][kScalesLoaded];
        wait_until_free(shared.ring, at);
        if (block_of_lane == i) {
          if constexpr (kChunks == 4)
            ptx::st_shared_v4_b32(&to[part * kChunks], current[0], current[1], current[2], current[3]);
          else
            ptx::st_shared_v2_b32(&to[part * kChunks], current[0], current[1]);
          if (part == 0) ptx::st_shared_b32(&to[kScalePartsOfB * kChunks], (folding >> i * kScalePartsOfB & kAll) == kAll);
        }
        ptx::syncwarp();
        if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&shared.ring.full[at.stage]);
      }
    }
  }
}
