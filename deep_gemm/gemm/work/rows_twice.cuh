// Both products of experts' rows by one kernel. The first activates: its D is the middle, A of the second product, whose rows go to
// addresses. The middle lies in a ring: block b of 128 rows has slot b % slots, so a few blocks of memory are enough.
//
//   finding warp       claims a tile of either product, whichever may be taken --queue--> all other roles
//   loading thread     first product:  read[b - slots] --acquire--> the slot is free
//                      second product: whole[b] --acquire, fence--> loads the slot by TMA
//   math warps         the first's rows --store--> slot;  the second's --> shared memory
//   storing warps      first product: fence, release --> whole[b];  second: release --> read[b], rows --> addresses
//
// Some CTAs prefer the first product, the others the second. Each takes a tile of the other product if it may not take its own:
//
//   a tile of the first product of block b    may be taken if all tiles of the second of blocks up to b - slots are claimed
//   a tile of the second product of block b   may be taken if all tiles of the first of block b are claimed
//
// So a tile waits only for tiles that were claimed before it, by CTAs that run. The one claimed first of those that are not over
// never waits, however few CTAs run at a time. One of the two next tiles may always be taken if `slots` has two bands of the raster.
//
// With kFetchesRows rows of A lie in such a ring too, and finding warps fetch them: work/fetch_rows.cuh.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "operand.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include "work/fetch_rows.cuh"
#include "work/layout.cuh"
#include "work/tile_queue.cuh"
#include SCALES

struct Counts {
  uint32_t claimed[3];  // tiles of each product, and units of rows that are fetched
  uint32_t over;        // storing warps that have no tiles any more
  uint32_t of_blocks[1];
};

// Counts of blocks of rows, one behind another. A tile adds kPartsOfTile to a count of its block.
enum class Of : uint32_t {
  kWhole,  // tiles of the first product that are written
  kRead,   // tiles of the second product that are multiplied
  kFetched,  // units of rows: each adds 1
  kCounts,
};
constexpr uint32_t kPartsOfTile = 2;

struct Params : Product {
  Groups groups;
  Activation activation;
  Product second;
  Rooms rooms;
  Meeting meeting;
  uint64_t second_sfb_stride;  // of groups, in elements
  Counts* counts;              // zeros before and after
  uint32_t blocks;             // that there may be
  uint32_t slots;              // blocks that a ring has room for: a power of two
  uint32_t lag;                // tiles of the first product before any CTA prefers the second
  uint32_t first_ctas;         // CTAs that prefer the first product
};

DEVICE uint32_t* count_of(const Params& p, Of of, uint32_t block) {
  return &p.counts->of_blocks[static_cast<uint32_t>(of) * p.blocks + block];
}

struct WorkStorage {
  TileQueue queue;

  DEVICE void init() { queue.init(kNumMathWarps + kStoringWarps + 1); }  // all roles but the dealing warp take
};

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row, of A
  uint32_t row_n;  // first column of the product
  uint32_t end_m;  // where the group's rows end, if all of them lay behind this row
  uint32_t group;
  uint32_t block = 0;          // the number of its block of rows
  uint32_t row_d = 0;          // first row of the middle, or of the table of addresses
  uint32_t stored_before = 0;  // how many of its first rows the tile above stores
  bool is_second = false;      // it is a tile of the second product
  static constexpr bool is_narrow = false;

  DEVICE bool is_in_ring() const { return kFetchesRows || is_second; }  // its rows of A
};

using TileToLoad = Tile;

DEVICE const Product& product_of(const Params& p, const Tile& tile) { return tile.is_second ? p.second : p; }

DEVICE void prefetch_operand_maps(const Params& p) {
  prefetch_maps(p);
  prefetch_maps(p.second);
}

constexpr bool kHasWholeD = false;

// Marks the end of the tiles: any other tile ends behind a row.
constexpr Tile kNoMoreTiles = {0, 0, 0, 0};
// A tile without rows. Math warps store a tile when they have the next one, so a finding warp that may claim none deals this one
// before it waits: others wait for the tile that is stored then.
constexpr Tile kPause = {1, 0, 1, 0};
// A tile's second word in the queue holds its column of tiles, then its block; the last one holds the group, then
// `stored_before`. Its highest bit says which product.
constexpr uint32_t kColumnBits = 12, kGroupBits = 24;
static_assert(kBlockM <= 128, "a count of rows in 7 bits");

struct Tiles {
  const Params& p;
  WorkStorage& storage;
  uint32_t number = 0;    // of the tiles that this thread has dealt or taken
  bool is_paused = true;  // this warp has dealt no tile, or last kPause

  DEVICE Tiles(const Params& p_, WorkStorage& storage_) : p(p_), storage(storage_) {}

  // By the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; take<false>(tile);) load(tile);
  }

  // By the producer's other warps: one claims tasks, and hands them out.
  DEVICE void find_for_others(uint32_t warp) {
    if (warp != 1) return;
    for (Tile tile; find_next(tile);) deal(tile);
    deal(kNoMoreTiles);
  }

  // By a math warp or a storing one.
  DEVICE bool next(Tile& tile) { return take<true>(tile); }

  DEVICE void finish(Tile&) {}

  DEVICE void deal(const Tile& tile) {
    if (ptx::lane_index() == 0)
      storage.queue.deal(number, {tile.row_m, tile.row_n / kBlockN | tile.block << kColumnBits, tile.end_m,
                                  tile.group | tile.stored_before << kGroupBits | static_cast<uint32_t>(tile.is_second) << 31});
    ptx::syncwarp();
    ++number;
  }

  template <bool kIsWarp>
  DEVICE bool take(Tile& tile) {
    storage.queue.wait_until_dealt(number);
    const ptx::Uint4 dealt = ptx::ld_shared_v4_b32(storage.queue.tile(number));
    ptx::Uint4 words = dealt;
    if constexpr (kIsWarp)  // waits until all lanes have read, and shows the compiler that they have read the same
      words = {ptx::shfl_sync(dealt.x, 0), ptx::shfl_sync(dealt.y, 0), ptx::shfl_sync(dealt.z, 0), ptx::shfl_sync(dealt.w, 0)};
    const uint32_t block = words.y >> kColumnBits, row_of_slot = block % p.slots * kBlockM;
    tile.block = block, tile.row_n = (words.y & ((1u << kColumnBits) - 1)) * kBlockN;
    tile.group = words.w & ((1u << kGroupBits) - 1), tile.is_second = words.w >> 31 != 0;
    tile.stored_before = words.w >> kGroupBits & 127;
    tile.row_m = tile.is_in_ring() ? row_of_slot : words.x, tile.row_d = tile.is_second ? words.x : row_of_slot - tile.stored_before;
    tile.end_m = tile.row_m + (words.z - words.x);
    storage.queue.give_back(number, dealt.x, !kIsWarp || ptx::lane_index() == 0);
    ++number;
    return words.z != kNoMoreTiles.end_m;
  }

  // One answer for the warp.
  DEVICE static uint32_t read(const uint32_t* count) {
    return ptx::shfl_sync(ptx::lane_index() == 0 ? ptx::ld_relaxed_gpu_b32(count) : 0, 0);
  }

  // Claims the next tile of either product. A tile is claimed late, so that CTAs end together.
  DEVICE bool find_next(Tile& tile) {
    while (kFetchesRows && !storage.queue.is_free(number) && fetch_next(false)) {
    }
    storage.queue.wait_until_free(number);
    while (true) {
      uint32_t* const claimed = p.counts->claimed;
      const uint32_t of_first = read(&claimed[0]), of_second = read(&claimed[1]);
      uint32_t over = 0;
      bool is_lost = false;  // to another CTA
      tile.is_second = ptx::block_index() >= p.first_ctas && of_first >= p.lag;
#pragma unroll 1
      for (uint32_t turn = 0; turn < 2; ++turn, tile.is_second = !tile.is_second) {
        const uint32_t wanted = tile.is_second ? of_second : of_first;
        uint32_t end_of_band;
        if (!find(tile, wanted, end_of_band)) ++over;
        else if (may_take(tile, of_first, of_second, end_of_band)) {
          const bool is_mine = ptx::lane_index() != 0 || ptx::atom_cas_b32(&claimed[tile.is_second], wanted, wanted + 1) == wanted;
          is_lost = !ptx::all_sync(is_mine);
          is_paused = is_paused && is_lost;
          if (!is_lost) return true;
          break;
        }
      }
      if (over == 2) return false;
      if (!kFetchesRows || is_lost) continue;
      if (!is_paused) {
        is_paused = true, tile = kPause;
        return true;
      }
      fetch_next(true);  // all tiles of the slot that it may wait for are claimed, or one could be claimed now
    }
  }

  // Whether all tiles that this one waits for are claimed, if these many tiles of either product are.
  DEVICE bool may_take(const Tile& tile, uint32_t of_first, uint32_t of_second, uint32_t end_of_band) const {
    if (tile.is_second) return of_first >= end_of_band * ceil_div(p.n, kBlockN);
    if (kFetchesRows && read(&p.counts->claimed[2]) < (tile.block + 1) * kUnitsOfBlock) return false;
    const uint32_t behind_band = tile.block + kRasterGroup;  // of the block that has the slot before this one
    return tile.block < p.slots || of_second >= (behind_band - p.slots) * ceil_div(p.second.n, kBlockN);
  }

  // From the first group on each time: there is time, and no register to remember where either product is. `end_of_band`: the
  // block behind the last one whose tiles the raster takes in turn with this one's.
  DEVICE bool find(Tile& tile, uint32_t wanted, uint32_t& end_of_band) const {
    const uint32_t tiles_n = ceil_div(product_of(p, tile).n, kBlockN);
    Stretches stretches(storage.queue.window);
    FoundTile found{};
    if (!stretches.find(p.groups, tiles_n, wanted, found)) return false;
    const uint32_t rows = found.stretch.end - found.stretch.first, tiles_m = found.stretch.tiles_m();
    const TileIndex index = place_in_raster(found.number, tiles_m, tiles_n);
    const uint32_t first_block = (wanted - found.number) / tiles_n, behind = (index.m / kRasterGroup + 1) * kRasterGroup;
    end_of_band = first_block + (behind < tiles_m ? behind : tiles_m);
    tile.row_m = index.m * kBlockM;
    tile.row_n = index.n * kBlockN;
    tile.block = first_block + index.m;
    if (!tile.is_in_ring()) move_up(tile.row_m, rows, kBlockM);
    tile.stored_before = index.m * kBlockM - tile.row_m;
    tile.row_m += found.stretch.first, tile.end_m = found.stretch.end, tile.group = found.stretch.group;
    return true;
  }

  // Fetches the next rows; false if there are none, or if their slot is not free and this warp does not wait until it is.
  DEVICE bool fetch_next(bool is_waiting) const {
    if constexpr (!kFetchesRows) return false;
    const uint32_t wanted = read(&p.counts->claimed[2]), block = wanted / kUnitsOfBlock, of_block = wanted % kUnitsOfBlock;
    Stretches stretches(storage.queue.window);
    FoundTile found{};
    if (!stretches.find(p.groups, 1, block, found)) return false;
    if (block >= p.slots) {
      const uint32_t needed = ceil_div(p.n, kBlockN) * kPartsOfTile;
      uint32_t parts = needed;
      if (ptx::lane_index() == 0)
        do parts = ptx::ld_acquire_gpu_b32(count_of(p, Of::kWhole, block - p.slots));
        while (is_waiting && parts < needed);
      if (!ptx::all_sync(parts >= needed)) return false;
    }
    const uint32_t first = found.stretch.first + found.number * kBlockM + of_block * kRowsOfUnit;
    const uint32_t rows = found.stretch.end - first, behind = wanted - of_block + kUnitsOfBlock;
    const uint32_t next = rows > kRowsOfUnit ? wanted + 1 : behind;  // a short block has fewer units
    const bool is_mine = ptx::lane_index() != 0 || ptx::atom_cas_b32(&p.counts->claimed[2], wanted, next) == wanted;
    if (!ptx::all_sync(is_mine)) return true;
    const Unit unit = {first, rows < kRowsOfUnit ? rows : kRowsOfUnit, block % p.slots * kBlockM + of_block * kRowsOfUnit};
    Fetch{p.rooms, p.meeting, p.k}.run(unit);
    ptx::syncwarp();  // all lanes have stored
    if (ptx::lane_index() == 0) {
      ptx::fence_proxy_async_global();
      ptx::red_release_gpu_add_b32(count_of(p, Of::kFetched, block), 1);
    }
    return true;
  }
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile& tile) {
  const bool is_pause = kFetchesRows && tile.row_m == tile.end_m;
  return KBlocks(is_pause ? 0 : product_of(p, tile).k);
}

// ---- The middle: written by a warpgroup, read by TMA of any CTA

// Rows of A that may be loaded: slots have whole blocks.
DEVICE uint32_t end_of_a(const Tile& tile) { return tile.is_in_ring() ? tile.row_m + kBlockM : tile.end_m; }
DEVICE uint32_t first_row_of_d(const Tile& tile) { return tile.row_d; }

// A warpgroup's part of a tile, or all of it if the other warpgroup has no rows.
DEVICE uint32_t parts_of(const Tile& tile) { return tile.row_m + 64 < tile.end_m ? kPartsOfTile / 2 : kPartsOfTile; }

// By a thread of a storing warp: the math warps have stored the middle.
DEVICE void count_written(const Params& p, const Tile& tile) {
  ptx::fence_proxy_async_global();
  ptx::red_release_gpu_add_b32(count_of(p, Of::kWhole, tile.block), parts_of(tile));
}

// The same: they have multiplied the slot, so TMA has read it.
DEVICE void count_read(const Params& p, const Tile& tile) {
  ptx::red_release_gpu_add_b32(count_of(p, Of::kRead, tile.block), parts_of(tile));
}

DEVICE void wait_for_count(const Params& p, Of of, uint32_t block, uint32_t needed) {
  while (ptx::ld_acquire_gpu_b32(count_of(p, of, block)) < needed) {
  }
}

// By the loading thread, which is ahead of the math warps: they store to a slot behind what it has waited for.
DEVICE void wait_for_operands(const Params& p, const Tile& tile) {
  const uint32_t rows = tile.end_m - tile.row_m < kBlockM ? tile.end_m - tile.row_m : kBlockM;
  if (tile.is_second) wait_for_count(p, Of::kWhole, tile.block, ceil_div(p.n, kBlockN) * kPartsOfTile);
  if (kFetchesRows && !tile.is_second) wait_for_count(p, Of::kFetched, tile.block, ceil_div(rows, kRowsOfUnit));
  if (!tile.is_second && tile.block >= p.slots)
    wait_for_count(p, Of::kRead, tile.block - p.slots, ceil_div(p.second.n, kBlockN) * kPartsOfTile);
  if (tile.is_in_ring()) ptx::fence_proxy_async_global();
}

// By each storing warp at its end. The last of all leaves zeros: all tiles are claimed, and all counts have been waited for.
DEVICE void leave_zeros(const Params& p) {
  const uint32_t lane = ptx::lane_index(), over = lane == 0 ? ptx::atom_add_acq_rel_b32(&p.counts->over, 1) + 1 : 0;
  if (ptx::shfl_sync(over, 0) < ptx::grid_size() * kStoringWarps) return;
  const uint32_t words = sizeof(Counts) / 4 - 1 + static_cast<uint32_t>(Of::kCounts) * p.blocks;
  ptx::syncwarp();
  for (uint32_t word = lane; word < words; word += 32) ptx::st_global_b32(&p.counts->claimed[0] + word, 0);
}

// The row of B for a column of a product. In the first one kGateColumns of gate and kGateColumns of up take turns.
DEVICE uint32_t row_of_b(const Product& p, const Tile& tile, uint32_t column) {
  if (tile.is_second) return column;
  constexpr uint32_t kTurn = 2 * kGateColumns;
  return column / kTurn * kGateColumns + column % kGateColumns + (column % kTurn < kGateColumns ? 0 : p.n / 2);
}

// ---- B's scales, of gate and up or of two blocks in a line; no C

DEVICE const float* sfb_of(const Params& p, const Tile& tile) {
  return product_of(p, tile).sfb + tile.group * (tile.is_second ? p.second_sfb_stride : p.groups.sfb_stride);
}

DEVICE TileScales scales_of_b(const Params& p, const Tile& tile) {
  const Product& of = product_of(p, tile);
  TileScales scales(sfb_of(p, tile), of.sfb_stride_n, of.sfb_stride_k, tile.row_n, of.n, KBlocks(of.k).end);  // a pause asks too
  if (tile.is_second) {
    scales.row[0] = sfb_of(p, tile) + uint64_t{tile.row_n / kScaleRowsOfB} * of.sfb_stride_n;
    scales.row[1] = scales.row[0] + (tile.row_n + kScaleRowsOfB < of.n ? of.sfb_stride_n : 0);
  }
  return scales;
}

DEVICE const uint8_t* c_of(const Params&, const Tile&) { return nullptr; }

#include "work/rows_of_tile.cuh"
