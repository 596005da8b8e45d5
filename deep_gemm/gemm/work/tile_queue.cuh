// A queue through which one role of a CTA hands the CTA's tiles to the others, which cannot find them by themselves:
//
//   work/rows.cuh     a warp that reads the layout deals    the loading thread and the math warps take
//   work/depths.cuh   the loading thread deals              the math warps take
//
// A slot goes round like one of the ring:   empty --wait--> tile --arrive--> full --wait--> read --arrive--> empty
#pragma once
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

// The last word of a tile is its group; the highest bit is free for something else. (work/rows.cuh has its own layout of it.)
constexpr uint32_t kGroupOfWord = 0x7fffffff;

// `number` counts the tiles that the caller has dealt, or taken, before. Each function is one thread's.
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

  // One answer for the warp, whose first lane asks.
  DEVICE bool is_free(uint32_t number) {
    return ptx::all_sync(ptx::lane_index() != 0 ||
                         ptx::mbarrier_test_wait_parity(&empty[number % kTileSlots], (number / kTileSlots & 1) ^ 1));
  }

  DEVICE void deal(uint32_t number, const ptx::Uint4& tile) {
    const uint32_t slot = number % kTileSlots;
    ptx::mbarrier_wait_parity(&empty[slot], (number / kTileSlots & 1) ^ 1);
    ptx::st_shared_v4_b32(&tiles[slot], tile.x, tile.y, tile.z, tile.w);
    ptx::mbarrier_arrive(&full[slot]);
  }

  DEVICE void wait_until_taken(uint32_t number) {
    ptx::mbarrier_wait_parity(&empty[number % kTileSlots], number / kTileSlots & 1);
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

// ---- Two products beside each other
//
// The second product multiplies rows while the first still stores others. Each has SMs of its own.
//
//   first, math warp       rows of a tile are stored --syncwarp, release--> count of the tile's block of rows
//   second, dealing warp   takes the next tile of all; counts of the blocks that it reads --acquire--> queue --fence--> TMA
//
// The first has fewer CTAs than there are SMs, and lets the second start at once. As CTAs of the first end, further CTAs of the
// second take their SMs. The first never waits for the second, so each wait ends.

struct Beside {
  uint32_t* stored;     // a count for each block: half tiles that warps have stored. Null: the product runs alone
  uint32_t* next_tile;  // of the second
  uint32_t block_rows;  // rows of a block, which is as high as a tile of the first
  uint32_t arrivals;    // added to the count for each 64 stored rows of a block
};

// Functions of `p` are templates, as most products have no such member.
DEVICE bool runs_beside(const auto& p) {
  if constexpr (kMayRunBeside) return p.beside.stored != nullptr;
  return false;
}

// The count of the block of a group that begins with this row. No two blocks share one, of a group or of two.
DEVICE uint32_t* count_of_block(const Beside& b, uint32_t first_row, uint32_t group, uint32_t block_rows) {
  return b.stored + first_row / block_rows + group;
}

// By the dealing warp: takes the next tile of all CTAs.
DEVICE uint32_t claim_tile(const auto& p) {
  uint32_t claimed = 0;
  if constexpr (kMayRunBeside)
    if (ptx::lane_index() == 0) claimed = ptx::atom_add(p.beside.next_tile, 1);
  return ptx::shfl_sync(claimed, 0);
}

// By the dealing warp: waits until the rows of a tile from row `from` of a stretch on are stored. The first's last tile may be
// moved up, and then stores rows of the block before again.
DEVICE void wait_until_stored(const auto& p, const auto& stretch, uint32_t from) {
  if constexpr (kMayRunBeside) {
    const Beside& b = p.beside;
    const uint32_t rows = stretch.end - stretch.first, last = (rows - 1) / b.block_rows;
    const uint32_t needed = b.arrivals * ceil_div(rows < b.block_rows ? rows : b.block_rows, 64);
    const uint32_t last_row = from + kBlockM < rows ? from + kBlockM - 1 : rows - 1;
    uint32_t end_block = last_row / b.block_rows;
    if (end_block + 1 == last && rows % b.block_rows != 0) end_block = last;
    for (uint32_t block = from / b.block_rows + ptx::lane_index(); block <= end_block; block += 32) {
      const uint32_t* const count = count_of_block(b, stretch.first + block * b.block_rows, stretch.group, b.block_rows);
      while (ptx::ld_acquire_gpu_b32(count) < needed) {
      }
    }
    ptx::syncwarp();
  }
}
