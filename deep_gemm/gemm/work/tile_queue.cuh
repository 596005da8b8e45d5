// A queue through which one role of a CTA hands the CTA's tiles to other roles, which cannot find tiles by themselves:
//
//   work/rows.cuh     a warp that reads the layout deals    the loading thread and the math warps take
//   work/depths.cuh   the loading thread deals              the math warps take
//
// A slot is used like a slot of the ring:   empty --wait--> tile --arrive--> full --wait--> read --arrive--> empty
#pragma once
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

// The last word of a tile is its group; the highest bit is free for something else. (work/rows.cuh divides it differently.)
constexpr uint32_t kGroupOfWord = 0x7fffffff;

// `number` counts the tiles that the caller has dealt, or taken, before. One thread calls each function.
struct TileQueue {
  alignas(16) ptx::Uint4 tiles[kTileSlots];
  alignas(16) uint32_t window[kWindowRows + kRunWords];  // of the layout, for the dealing warp: see Stretches
  uint64_t full[kTileSlots], empty[kTileSlots];

  DEVICE void init(uint32_t takers) {
    for (uint32_t slot = 0; slot < kTileSlots; ++slot) {
      ptx::mbarrier_init(&full[slot], 1);        // the dealer
      ptx::mbarrier_init(&empty[slot], takers);  // each taker
    }
  }

  DEVICE void wait_until_free(uint32_t number) {
    ptx::mbarrier_wait_parity(&empty[number % kTileSlots], (number / kTileSlots & 1) ^ 1);
  }

  // The first lane tests, and the whole warp gets its result.
  DEVICE bool is_free(uint32_t number) {
    return ptx::all_sync(ptx::lane_index() != 0 ||
                         ptx::mbarrier_test_wait_parity(&empty[number % kTileSlots], (number / kTileSlots & 1) ^ 1));
  }

  DEVICE void deal(uint32_t number, const ptx::Uint4& tile) {
    const uint32_t slot = number % kTileSlots;
    wait_until_free(number);
    ptx::st_shared_v4_b32(&tiles[slot], tile.x, tile.y, tile.z, tile.w);
    ptx::mbarrier_arrive(&full[slot]);
  }

  DEVICE void wait_until_dealt(uint32_t number) {
    ptx::mbarrier_wait_parity(&full[number % kTileSlots], number / kTileSlots & 1);
  }

  DEVICE const ptx::Uint4* tile(uint32_t number) const { return &tiles[number % kTileSlots]; }

  // `read` must come from the tile's slot: the arrival depends on it, so it cannot overtake the load.
  DEVICE void give_back(uint32_t number, uint32_t read, bool is_arriving) {
    ptx::mbarrier_arrive_after(&empty[number % kTileSlots], read, is_arriving);
  }
};
