// Through it one role of a CTA deals the CTA's tiles out to the others, where these could not find them by themselves:
//
//   rows are grouped     a warp that reads the layout deals     the loading thread and the math warps take
//   groups are along k   the loading thread deals               the math warps take
//
// A slot goes round like one of the ring:   empty --wait--> tile --arrive--> full --wait--> read --arrive--> empty
#pragma once
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
  union {
    uint32_t end_m;         // where the group's rows end
    uint32_t num_k_blocks;  // where groups are along k, the group's
  };
  uint32_t group;
  bool is_narrow = false;  // it is only the first kUnitN columns
};

// What follows the last tile: a tile ends behind a row; a group along k may have no depth, but none is so deep.
constexpr Tile kNoMoreTiles = {0, 0, kIsKGrouped ? 0xffffffff : 0, 0};

constexpr uint32_t kTileTakers = kNumMathWarps + (kIsKGrouped ? 0 : 1);

struct TileQueue {
  alignas(16) ptx::Uint4 tiles[kTileSlots];  // as they come in Tile; the last is the group, its highest bit is_narrow
  alignas(16) uint32_t window[kWindowRows];  // what the dealing warp sees of the layout: see Stretches in groups.cuh
  uint64_t full[kTileSlots], empty[kTileSlots];

  DEVICE void init() {
    for (uint32_t slot = 0; slot < kTileSlots; ++slot) {
      ptx::mbarrier_init(&full[slot], 1);
      ptx::mbarrier_init(&empty[slot], kTileTakers);
    }
  }
};

// By a thread, or a warp. `number` counts the tiles that have been dealt, or taken, through the queue.
template <bool kIsWarp>
DEVICE void deal(TileQueue& queue, uint32_t& number, const Tile& tile) {
  const uint32_t slot = number % kTileSlots;
  if (!kIsWarp || ptx::lane_index() == 0) {
    ptx::mbarrier_wait_parity(&queue.empty[slot], (number / kTileSlots & 1) ^ 1);
    const uint32_t last_word = tile.group | static_cast<uint32_t>(tile.is_narrow) << 31;
    ptx::st_shared_v4_b32(&queue.tiles[slot], tile.row_m, tile.row_n, tile.end_m, last_word);
    ptx::mbarrier_arrive(&queue.full[slot]);
  }
  if constexpr (kIsWarp) ptx::syncwarp();
  ++number;
}

// By a thread, or a warp: reads a tile that is there, and gives the slot back.
template <bool kIsWarp>
DEVICE void take(TileQueue& queue, uint32_t& number, Tile& tile) {
  const uint32_t slot = number % kTileSlots;
  const ptx::Uint4 dealt = ptx::ld_shared_v4_b32(&queue.tiles[slot]);
  ptx::Uint4 words = dealt;
  if constexpr (kIsWarp && kIsKGrouped) ptx::syncwarp();  // all lanes have read
  if constexpr (kIsWarp && !kIsKGrouped)  // this too waits for all lanes, and shows the compiler that they have the same
    words = {ptx::shfl_sync(dealt.x, 0), ptx::shfl_sync(dealt.y, 0), ptx::shfl_sync(dealt.z, 0), ptx::shfl_sync(dealt.w, 0)};
  tile = {words.x, words.y, words.z, words.w & 0x7fffffff, words.w >> 31 != 0};
  ptx::mbarrier_arrive_after(&queue.empty[slot], dealt.x, !kIsWarp || ptx::lane_index() == 0);
  ++number;
}

// By a thread, or a warp: takes the next tile, if there is one. Where groups are along k only its depth: it stays in the
// queue while it is multiplied, for want of registers, and is taken then.
template <bool kIsWarp>
DEVICE bool next_of_queue(TileQueue& queue, uint32_t& number, Tile& tile) {
  const uint32_t slot = number % kTileSlots;
  ptx::mbarrier_wait_parity(&queue.full[slot], number / kTileSlots & 1);
  if constexpr (kIsKGrouped) {
    tile.num_k_blocks = ptx::ld_shared_b32(&queue.tiles[slot].z);
    // One answer for the warp, or ptxas takes ring positions for different in its lanes, and moves descriptors one by one.
    return ptx::all_sync(tile.num_k_blocks != kNoMoreTiles.num_k_blocks);
  }
  take<kIsWarp>(queue, number, tile);
  return tile.end_m != kNoMoreTiles.end_m;
}
