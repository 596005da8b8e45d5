// Products of several groups of rows, each with its own B. One warp of each CTA finds the CTA's tiles in the layout,
// and hands them to the thread that loads and to the math warps. This warp is ahead of the other roles, so a search
// delays them little. After its last tile it writes the zeros that callers expect in the padding after a group.
//
// CTA i takes tiles i, i + CTAs, ... Each stretch of a group's rows has a raster of its own, and the count goes on from one
// stretch to the next. There are no clusters.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "operand.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include "work/layout.cuh"
#include "work/padding.cuh"
#include "work/tile_queue.cuh"
#include ROWS_PARAMS

struct WorkStorage {
  TileQueue queue;

  DEVICE void init() {
    queue.init(kNumMathWarps + kStoringWarps + 1 + kConvertGroups * kConvertWarps + kScalingWarps);  // all roles but the dealing warp take
  }
};

// D has a plain map too, for boxes that are not cut off.
constexpr bool kHasWholeD = !kSfbIsPerRow && kStoresByTma;

DEVICE void prefetch_operand_maps(const Params& p) {
  prefetch_maps(p);
  if constexpr (kHasWholeD) ptx::prefetch_tensormap(&p.map_whole_d);
}

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
  uint32_t end_m;  // where the group's rows end
  uint32_t group;
  bool is_narrow = false;  // true if the tile is only its first kUnitN columns
  uint32_t stored_before = 0;  // with kToAddresses: first rows that the tile above stores
};

using TileToLoad = Tile;

// A tile's last word in the queue holds the group, then `stored_before`. Its highest bit says whether the tile is narrow.
constexpr uint32_t kGroupBits = kToAddresses ? 24 : 31;
static_assert(!kToAddresses || kBlockM <= 128, "a count of rows in 7 bits");

// Marks the end of the tiles: end_m of any other tile is above 0.
constexpr Tile kNoMoreTiles = {0, 0, 0, 0};

struct Tiles {
  const Params& p;
  WorkStorage& storage;
  uint32_t number = 0;  // tiles that this thread has dealt or taken
  uint32_t rows, tiles_m, tiles_n, next_tile;
  Stretches stretches;

  DEVICE Tiles(const Params& p_, WorkStorage& storage_)
      : p(p_),
        storage(storage_),
        rows(p.m),
        tiles_m(ceil_div(p.m, kBlockM)),
        tiles_n(ceil_div(p.n, kBlockN)),
        next_tile(ptx::block_index()),
        stretches(storage_.queue.window) {}

  // Called by the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; take<false>(tile);) load(tile);
  }

  // Called by the producer's other warps: one warp finds the tiles and deals them.
  DEVICE void find_for_others(uint32_t warp) {
    if (warp != 1) return;
    for (Tile tile; find_next(tile);) deal(tile);
    deal(kNoMoreTiles);
    if (p.groups.zeroes_padding) zero_padding(p.groups, storage.queue.window, p.d, p.d_pitch * kOutputBytes, p.n * kOutputBytes);
  }

  // Called by a math warp.
  DEVICE bool next(Tile& tile) { return take<true>(tile); }

  DEVICE void finish(Tile&) {}

  // ---- Through the queue

  DEVICE void deal(const Tile& tile) {
    if (ptx::lane_index() == 0)
      storage.queue.deal(number, {tile.row_m, tile.row_n, tile.end_m,
                          tile.group | tile.stored_before << kGroupBits | static_cast<uint32_t>(tile.is_narrow) << 31});
    ptx::syncwarp();
    ++number;
  }

  template <bool kIsWarp>
  DEVICE bool take(Tile& tile) {
    storage.queue.wait_until_dealt(number);
    const ptx::Uint4 dealt = ptx::ld_shared_v4_b32(storage.queue.tile(number));
    ptx::Uint4 words = dealt;
    if constexpr (kIsWarp)  // waits until all lanes have read, and shows the compiler that all have the same values
      words = {ptx::shfl_sync(dealt.x, 0), ptx::shfl_sync(dealt.y, 0), ptx::shfl_sync(dealt.z, 0), ptx::shfl_sync(dealt.w, 0)};
    tile = {words.x, words.y, words.z, words.w & ((1u << kGroupBits) - 1), words.w >> 31 != 0};
    if constexpr (kToAddresses) tile.stored_before = words.w >> kGroupBits & 127;
    storage.queue.give_back(number, dealt.x, !kIsWarp || ptx::lane_index() == 0);
    ++number;
    return tile.end_m != kNoMoreTiles.end_m;
  }

  // ---- The search for tiles

  DEVICE bool find_next(Tile& tile) {
    FoundTile found{};
    if (!find(p.groups, found)) return false;
    rows = found.stretch.end - found.stretch.first;
    tiles_m = found.stretch.tiles_m();
    const TileIndex index = place_in_raster(found.number, tiles_m, tiles_n);
    tile.row_m = index.m * kBlockM;
    tile.row_n = index.n * kBlockN;
    // Shorten a tall last tile to whole units of 64 rows; then move it up so that it ends with the group.
    const uint32_t rows_of_units = ceil_div(rows - tile.row_m, 64) * 64;
    const uint32_t height = kHasShortTiles && rows_of_units < kBlockM ? rows_of_units : kBlockM;
    move_up(tile.row_m, rows, height);
    if constexpr (kToAddresses) tile.stored_before = index.m * kBlockM - tile.row_m;
    tile.row_m += found.stretch.first, tile.end_m = found.stretch.end, tile.group = found.stretch.group;
    if (found.is_second_half) tile.row_n += kUnitN;  // perhaps past the last column of D
    tile.is_narrow = found.is_half;
    next_tile += ptx::grid_size();
    return true;
  }

  // Finds this CTA's next tile. If the last wave has at most half as many tiles as CTAs, two CTAs share each tile, and
  // the function finds this CTA's half. If a tile exists in the middle of the wave, the wave has more tiles than that.
  // The function searches for these three tiles in the order of their numbers.
  DEVICE bool find(const Groups& groups, FoundTile& found) {
    const uint32_t cta = ptx::block_index(), wave = next_tile - cta, middle = wave + ptx::grid_size() / 2;
    // A search through ids would keep the first tile waiting.
    if (!kCutsLastTiles || (kGroups == kGroupIds && wave == 0)) return stretches.find(groups, tiles_n, next_tile, found);
    FoundTile shared{};
    bool is_tile = false, is_shared = false;
#pragma unroll 1  // one code for all searches
    for (uint32_t search = 0; search < 3; ++search) {
      const bool is_low = (search == 1) == (next_tile < middle);
      const uint32_t wanted = search == 0 ? wave + cta / 2 : is_low ? next_tile : middle;
      FoundTile at_hand;
      if (!stretches.find(groups, tiles_n, wanted, at_hand)) break;
      if (search == 0) shared = at_hand, is_shared = true;
      if (wanted == next_tile) found = at_hand, is_tile = true;
      if (wanted == middle) is_shared = false;
    }
    if (!is_shared) return is_tile;
    found = shared, found.is_half = true, found.is_second_half = cta % 2 == 1;
    return true;
  }
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile&) { return KBlocks(p.k); }
DEVICE uint32_t end_of_a(const Tile& tile) { return tile.end_m; }
DEVICE uint32_t first_address_of(const Tile& tile) { return tile.row_m; }
DEVICE uint32_t scale_parts_of(const Tile&) { return kScaleParts; }
DEVICE const Product& product_of(const Params& p, const Tile&) { return p; }
DEVICE uint32_t row_of_b(const Product& p, const Tile&, uint32_t column) { return row_of_b(p, column); }

DEVICE const float* sfb_of(const Params& p, const Tile& tile) { return p.sfb + tile.group * p.groups.sfb_stride; }
DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) { return p.c + static_cast<uint64_t>(tile.group) * p.n * kCBytes; }

#include "work/rows_of_tile.cuh"
