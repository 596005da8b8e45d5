// Products of several groups of rows, each with its own B. One warp of each CTA finds the CTA's tiles in the layout,
// and hands them to the thread that loads and to the math warps. It is ahead of them, so that a search delays them
// little. At last it writes the zeros that callers expect in the padding behind a group.
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
  bool is_narrow = false;  // it is only the first kUnitN columns
  uint32_t stored_before = 0;  // how many of its first rows the tile above stores, with kMayRunBeside
};

using TileToLoad = Tile;

// A tile's last word in the queue holds the group, then `stored_before`. Its highest bit says whether the tile is narrow.
constexpr uint32_t kGroupBits = kMayRunBeside ? 24 : 31;
static_assert(!kMayRunBeside || kBlockM <= 128, "a count of rows in 7 bits");

// Tiles that a CTA takes ahead, beside the product whose rows it reads: few, as other CTAs may be idle when that product ends.
constexpr uint32_t kClaimedAhead = 2;

// Marks the end of the tiles: any other tile ends behind a row.
constexpr Tile kNoMoreTiles = {0, 0, 0, 0};

struct Tiles {
  const Params& p;
  WorkStorage& storage;
  uint32_t number = 0;  // of the tiles that this thread has dealt or taken
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

  // By the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; take<false>(tile);) {
      if (kToAddresses && runs_beside(p)) ptx::fence_proxy_async_global();  // TMA is going to read rows that threads have stored
      load(tile);
    }
  }

  // By the producer's other warps: one finds the tiles, and hands them out.
  DEVICE void find_for_others(uint32_t warp) {
    if (warp != 1) return;
    for (Tile tile; find_next(tile);) deal(tile);
    deal(kNoMoreTiles);
    if (p.groups.zeroes_padding) zero_padding(p.groups, storage.queue.window, p.d, p.d_pitch * kOutputBytes, p.n * kOutputBytes);
  }

  // By a math warp.
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
    if constexpr (kIsWarp)  // waits until all lanes have read, and shows the compiler that they have read the same
      words = {ptx::shfl_sync(dealt.x, 0), ptx::shfl_sync(dealt.y, 0), ptx::shfl_sync(dealt.z, 0), ptx::shfl_sync(dealt.w, 0)};
    tile = {words.x, words.y, words.z, words.w & ((1u << kGroupBits) - 1), words.w >> 31 != 0};
    if constexpr (kMayRunBeside) tile.stored_before = words.w >> kGroupBits & 127;
    storage.queue.give_back(number, dealt.x, !kIsWarp || ptx::lane_index() == 0);
    ++number;
    return tile.end_m != kNoMoreTiles.end_m;
  }

  // ---- Finding them

  DEVICE bool find_next(Tile& tile) {
    FoundTile found{};
    if (kToAddresses && runs_beside(p)) {
      if (number >= kClaimedAhead) storage.queue.wait_until_taken(number - kClaimedAhead);
      next_tile = claim_tile(p);
    }
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
    if constexpr (kMayRunBeside) tile.stored_before = index.m * kBlockM - tile.row_m;
    if (kToAddresses && runs_beside(p)) wait_until_stored(p, found.stretch, tile.row_m);
    tile.row_m += found.stretch.first, tile.end_m = found.stretch.end, tile.group = found.stretch.group;
    if (found.is_second_half) tile.row_n += kUnitN;  // past the last column of D perhaps
    tile.is_narrow = found.is_half;
    next_tile += ptx::grid_size();
    return true;
  }

  // Finds this CTA's next tile. If the last wave has no more tiles than half of the CTAs, two CTAs share each tile, and
  // this finds the CTA's half. A tile in the middle of the wave shows that the wave has more. All three tiles are
  // looked for in the order of their numbers.
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

// A warpgroup's share of a tile: nothing if the group ends before the warpgroup's rows; its first units if the tile is
// short or narrow.
struct Share {
  bool is_any = false, is_part = false;

  DEVICE void set(const Tile& tile, uint32_t warpgroup) {
    // One answer for the warp, or ptxas takes ring positions for different in its lanes, and moves descriptors one by one.
    const auto ends_at = [&](uint32_t row) { return ptx::all_sync(tile.row_m + row >= tile.end_m); };
    is_any = !(kNumMathWarpgroups > 1 && ends_at(warpgroup * 64));
    if (!is_any) return;
    if constexpr (kUnitsOfPart > 0) is_part = kHasShortTiles ? ends_at(warpgroup * 64 + kUnitStride) : tile.is_narrow;
  }

  template <typename Use>
  DEVICE void with(Totals& total, const Use& use) const {
    constexpr uint32_t kFirstUnits = kUnitsOfPart > 0 ? kUnitsOfPart : kUnitsPerWarpgroup;
    if (kUnitsOfPart > 0 && !kBranchesOnParts && is_part)
      use(reinterpret_cast<float(&)[kFirstUnits][kUnitN / 2]>(total));
    else
      use(total);
  }
};

// ---- Rows that are not the group's
//
// A box of a tensor map must not reach past the end of its group's rows, neither to write nor to load. A and D are
// described with one dimension more: `height` rows, the box's, and as many places where they may begin, one pitch apart.
//
//   address of box row i = base + (i_first + i + place) * pitch      i_first + i < height is the hardware's bound
//
// The base lies `height` rows before the tensor. So the box that begins in place row + r, with its first row at height -
// r, has r rows from `row` on, and the rest of it is out of bounds: it loads as zeros and is not stored.
struct ClippedBox {
  uint32_t first, place;

  DEVICE ClippedBox(uint32_t row, uint32_t end, uint32_t height) {
    const uint32_t rows = row >= end ? 0 : end - row < height ? end - row : height;
    first = height - rows, place = row + rows;
  }
};

// Rows of A that are loaded for a tile: whole boxes, as far as the group has rows. Older data behind them in the slot
// are not multiplied, or only by a warpgroup that does not store these rows.
DEVICE uint32_t rows_loaded(const Tile& tile) {
  const uint32_t boxes = ceil_div(tile.end_m - tile.row_m, kBoxRowsOfA);
  return (boxes < kBlockM / kBoxRowsOfA ? boxes : kBlockM / kBoxRowsOfA) * kBoxRowsOfA;
}

// Which of the row-grouped matrices: with kGroupCounts each group has its own.
DEVICE uint32_t plane_of(const Tile& tile) { return kGroups == kGroupCounts ? tile.group : 0; }

// Scales that are loaded ahead of a tile's own: TMA loads from a multiple of 16 bytes on, and a group begins at any row.
DEVICE uint32_t skipped_scales(const Tile& tile) { return kRowsAreStacked ? tile.row_m % 4 : 0; }

// ---- Loads

DEVICE uint32_t bytes_of_slot(const Params&, const Tile& tile) {
  return kSlotBytes - (kBlockM - rows_loaded(tile)) * kLineBytes - (tile.is_narrow ? kBlockN - kBoxRowsOfB : 0) * kLineBytes;
}

struct TileLoad {
  const Params& p;
  const Tile& tile;
  uint32_t slot_bytes;

  DEVICE TileLoad(const Params& p_, const Tile& tile_) : p(p_), tile(tile_), slot_bytes(bytes_of_slot(p_, tile_)) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t k) const {
#pragma unroll
    for (uint32_t row = 0; row < kBlockM; row += kBoxRowsOfA) {
      if (row >= rows_loaded(tile)) break;
      const ClippedBox box(tile.row_m + row, tile.end_m, kBoxRowsOfA);
      ptx::tma_load_4d(&p.map_a, slot.full, slot.a + row * kLineBytes, k, box.first, box.place, plane_of(tile));
    }
#pragma unroll
    for (uint32_t row = 0; row < kBlockN; row += kBoxRowsOfB) {
      if (row > 0 && tile.is_narrow) break;
      load_rows<kBIsMnMajor, kBoxRowsOfB>(&p.map_b, slot.full_of_b, slot.b + row * kLineBytes, k / kPackedB,
                                          row_of_b(p, tile.row_n + row), tile.group);
    }
    if constexpr (kHasScales) load_scales(slot, k_block);
  }

  DEVICE void load_scales(const Slot& slot, uint32_t k_block) const {
#pragma unroll
    for (uint32_t row = 0; row < kScaleRows; row += kBoxScaleRows)
      ptx::tma_load_3d(&p.map_sfa, slot.full, slot.scales + row, tile.row_m - skipped_scales(tile) + row, k_block * kScaleParts,
                       plane_of(tile));
    if constexpr (kSfbIsPerRow)
      ptx::tma_load_3d(&p.map_sfb, slot.full, slot.scales + kScaleParts * kScaleRows, tile.row_n,
                       k_block * kScalePartsOfB, tile.group);
  }
};

// ---- B's scales, C, which is a bias for each group, and D.

DEVICE const float* sfb_of(const Params& p, const Tile& tile) { return p.sfb + tile.group * p.groups.sfb_stride; }
DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) { return p.c + static_cast<uint64_t>(tile.group) * p.n * kCBytes; }

// Where the panels of a tile lie in D. If the group has all rows that are stored, down to `end_row`, through the plain map.
struct Destination {
  const Params& p;
  const Tile& tile;
  Span span;
  bool is_whole;

  DEVICE Destination(const Params& p_, const Tile& tile_, uint32_t end_row)
      : p(p_), tile(tile_), span(p_.n), is_whole(kHasWholeD && end_row <= tile_.end_m) {}

  DEVICE void store(const uint8_t* panel, uint32_t column, uint32_t row) const {
    if (is_whole) {
      ptx::tma_store_3d(&p.map_whole_d, panel, column, row, plane_of(tile));
    } else {
      const ClippedBox rows(row, tile.end_m, 64);
      ptx::tma_store_4d(&p.map_d, panel, column, rows.first, rows.place, plane_of(tile));
    }
  }

  DEVICE void prefetch(uint32_t, uint32_t) const {}
};
