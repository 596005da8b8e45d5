// One kernel computes both products of experts' rows. Finding warps fetch the rows: work/fetch_rows.cuh. The first product's D is
// activated: this middle is A of the second product, whose rows go to addresses. Rows and middle are in rings: block b of 128 rows
// has slot b % slots of each ring, so a few blocks are enough. fetched, whole and read count a block's progress (`Of`).
//
//   finding warp       claims tiles of its CTA's product --queue--> all other roles
//   loading thread     first product:  fetched[b], read[b - slots] --acquire, fence--> loads from the slot of rows
//                      second product: whole[b] --acquire, fence--> loads from the slot of the middle
//   math warps         first product: rows --store--> slot;  second: rows --> shared memory
//   storing warps      first product: fence, release --> whole[b];  second: release --> read[b], rows --> addresses
//
// A CTA has one of two roles: to claim tiles of the first product until none is left, then of the second; or only of the second.
// All CTAs claim the first `lag` tiles, whose slots are new. Only the loading thread waits, for its CTA's tiles one by one.
//
// Why each wait ends: let b be the block of the first product's unfinished tile with the smallest number. This tile waits for
// the second product's tiles of block b - slots. A ring has two bands of the raster, so that block is in an earlier band, whose
// first product is over. A CTA that claims such a tile of the second product has no earlier tile that waits for a slot:
// its role is the second, or its last tile of the first product has its slot. So both roles must run.
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

// Counters. A CTA claims a number by adding 1.
enum class Next : uint32_t {
  kOfAll,      // tiles of the first product up to `lag`, for all CTAs
  kFirst,      // later tiles of the first product
  kSecond,     // tiles of the second product
  kRowsOfAll,  // units of the first band's rows, for all warps that may fetch
  kRows,       // later units of rows
  kCounters,
};

struct Counts {
  uint32_t next[static_cast<uint32_t>(Next::kCounters)];
  uint32_t over;  // finding and storing warps that have ended
  uint32_t of_blocks[1];
};

// Counts for all blocks of rows, one count after another. A tile adds kPartsOfTile to a count of its block.
enum class Of : uint32_t {
  kWhole,    // tiles of the first product that are written
  kRead,     // tiles of the second product that are multiplied
  kFetched,  // units of fetched rows: each unit adds 1
  kCounts,
};
constexpr uint32_t kPartsOfTile = 2;

struct Params : Product {
  Groups groups;
  Activation activation;
  Product second;
  Rooms rooms;
  Meeting meeting;
  uint64_t second_sfb_stride;  // from one group to the next, in elements
  Counts* counts;              // zeros before and after a launch
  uint32_t blocks;             // the most blocks that rows may have
  uint32_t slots;              // blocks that a ring has room for: a power of two
  uint32_t lag;                // tiles of the first product that all CTAs may claim: tiles of the first `slots` blocks
  uint32_t first_ctas;         // the most CTAs that take the first product as long as it has tiles
};

DEVICE uint32_t* count_of(const Params& p, Of of, uint32_t block) {
  return &p.counts->of_blocks[static_cast<uint32_t>(of) * p.blocks + block];
}

struct WorkStorage {
  TileQueue queue;
  alignas(16) uint8_t staging[kStagingBytes];  // used by the finding warp

  DEVICE void init() { queue.init(kNumMathWarps + kStoringWarps + 1); }  // all roles but the dealing warp take tiles
};

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row in the ring
  uint32_t row_n;  // first column of the product
  uint32_t end_m;  // where the group's rows would end in the ring if all from `row` on followed row_m
  uint32_t group;
  uint32_t block = 0;      // the number of its block of rows
  uint32_t row = 0;        // first row among all rows
  bool is_second = false;  // it is a tile of the second product
  static constexpr bool is_narrow = false;
  static constexpr uint32_t stored_before = 0;
};

using TileToLoad = Tile;

DEVICE const Product& product_of(const Params& p, const Tile& tile) { return tile.is_second ? p.second : p; }

DEVICE void prefetch_operand_maps(const Params& p) {
  prefetch_maps(p);
  prefetch_maps(p.second);
}

constexpr bool kHasWholeD = false;

// Marks the end of the tiles: end_m of any other tile is above 0.
constexpr Tile kNoMoreTiles = {0, 0, 0, 0};
// A tile's second word in the queue holds its column of tiles, then its block. The last word's top bit: the second product.
constexpr uint32_t kColumnBits = 12;

// ---- Counts: the middle is written by a warpgroup, and read by TMA of any CTA

// The number that a warpgroup adds for a tile: half of kPartsOfTile, or all if the other warpgroup has no rows.
DEVICE uint32_t parts_of(const Tile& tile) { return tile.row_m + 64 < tile.end_m ? kPartsOfTile / 2 : kPartsOfTile; }

// Called by a thread of a storing warp once math warps have stored the middle, or multiplied it: TMA has read its slot.
DEVICE void count_tile(const Params& p, const Tile& tile) {
  if (!tile.is_second) ptx::fence_proxy_async_global();
  ptx::red_release_gpu_add_b32(count_of(p, tile.is_second ? Of::kRead : Of::kWhole, tile.block), parts_of(tile));
}

DEVICE void wait_for_count(const Params& p, Of of, uint32_t block, uint32_t needed) {
  while (ptx::ld_acquire_gpu_b32(count_of(p, of, block)) < needed) {
  }
}

// Called by the loading thread. It is ahead of the math warps, so a slot is free when they store to it.
DEVICE void wait_for_operands(const Params& p, const Tile& tile) {
  if (tile.end_m == kNoMoreTiles.end_m) return;
  const uint32_t rows = tile.end_m - tile.row_m < kBlockM ? tile.end_m - tile.row_m : kBlockM;
  if (tile.is_second) {
    wait_for_count(p, Of::kWhole, tile.block, ceil_div(p.n, kBlockN) * kPartsOfTile);
  } else {
    wait_for_count(p, Of::kFetched, tile.block, ceil_div(rows, kRowsOfUnit));
    const uint32_t needed = ceil_div(p.second.n, kBlockN) * kPartsOfTile;
    if (tile.block >= p.slots) wait_for_count(p, Of::kRead, tile.block - p.slots, needed);
  }
  ptx::fence_proxy_async_global();
}

// Called by each finding and storing warp at its end. The last warp leaves zeros: all tiles are claimed, no warp waits.
DEVICE void leave_zeros(const Params& p) {
  const uint32_t lane = ptx::lane_index(), over = lane == 0 ? ptx::atom_add_acq_rel_b32(&p.counts->over, 1) + 1 : 0;
  if (ptx::shfl_sync(over, 0) < ptx::grid_size() * (1 + kStoringWarps)) return;
  const uint32_t words = sizeof(Counts) / 4 - 1 + static_cast<uint32_t>(Of::kCounts) * p.blocks;
  ptx::syncwarp();
  for (uint32_t word = lane; word < words; word += 32) ptx::st_global_b32(&p.counts->next[0] + word, 0);
}

// ---- The tiles of a CTA

struct Tiles {
  static constexpr uint32_t kLate = kTileSlots - 2;  // at most two tiles are dealt and not taken, so that CTAs end together
  const Params& p;
  WorkStorage& storage;
  uint32_t number = 0;  // tiles that this thread has dealt or taken
  uint32_t ahead = kLate;  // the finding warp deals tile `number` once the queue's slot of `number + ahead` is free
  Next from = Next::kOfAll, rows_from = Next::kRowsOfAll;

  DEVICE Tiles(const Params& p_, WorkStorage& storage_) : p(p_), storage(storage_) {}

  // Called by the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; take<false>(tile);) load(tile);
  }

  // Called by the producer's other warps: one claims and deals tiles. While there are rows to fetch, it never waits: a
  // slot for rows is free once tiles are stored, and math warps store a tile only after they have taken the next one.
  DEVICE void find_for_others(uint32_t warp) {
    if (warp != 1) return;
    Unit unit{};
    bool has_tiles = true;
    for (bool has_rows = true; has_rows; has_rows = claim_or_fetch(unit))
      if (has_tiles && storage.queue.is_free(number + ahead)) has_tiles = deal_next();
    while (has_tiles) storage.queue.wait_until_free(number + ahead), has_tiles = deal_next();
    leave_zeros(p);
  }

  // Called by a math warp or a storing warp.
  DEVICE bool next(Tile& tile) { return take<true>(tile); }

  DEVICE void finish(Tile&) {}

  DEVICE void deal(const Tile& tile) {
    if (ptx::lane_index() == 0)
      storage.queue.deal(number, {tile.row, tile.row_n / kBlockN | tile.block << kColumnBits, tile.end_m,
                                  tile.group | static_cast<uint32_t>(tile.is_second) << 31});
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
    tile.block = words.y >> kColumnBits, tile.row_n = (words.y & ((1u << kColumnBits) - 1)) * kBlockN;
    tile.row = words.x, tile.group = words.w & kGroupOfWord, tile.is_second = words.w >> 31 != 0;
    tile.row_m = tile.block % p.slots * kBlockM;
    tile.end_m = tile.row_m + (words.z - words.x);
    if constexpr (!kIsWarp) wait_for_operands(p, tile);
    storage.queue.give_back(number, dealt.x, !kIsWarp || ptx::lane_index() == 0);
    ++number;
    return words.z != kNoMoreTiles.end_m;
  }

  // Claims a counter's next number.
  DEVICE uint32_t claim(Next counter) const {
    uint32_t* const next = &p.counts->next[static_cast<uint32_t>(counter)];
    return ptx::shfl_sync(ptx::lane_index() == 0 ? ptx::atom_add(next, 1) : 0, 0);
  }

  // Claims a tile and deals it; false after the last tile. Between both products it deals no tile until all roles have taken
  // the tiles of the first product.
  DEVICE bool deal_next() {
    Tile tile;
    if (from != Next::kSecond) {
      if (find_first(tile)) deal(tile);
      else from = Next::kSecond, ahead = kTileSlots - 1;
      return true;
    }
    ahead = kLate, tile.is_second = true;
    const bool is_found = find(tile, claim(from));
    if (!is_found) tile = kNoMoreTiles;
    deal(tile);
    return is_found;
  }

  // Finds a tile of the first product; false if this CTA takes no more of them.
  DEVICE bool find_first(Tile& tile) {
    tile.is_second = false;
    if (from == Next::kOfAll) {
      const uint32_t wanted = claim(from);
      if (wanted < p.lag && find(tile, wanted)) return true;
      from = Next::kFirst;
      if (is_of_second_role()) return false;
    }
    return find(tile, p.lag + claim(from));
  }

  // CTAs of both roles take turns, so that both run if few do: CTA 0 has the first role, CTA 1 the second.
  DEVICE bool is_of_second_role() const {
    const uint32_t ctas = ptx::grid_size(), of_first = ctas_of_first_role(), of_second = ctas - of_first;
    return (ptx::block_index() * of_second + of_first - 1) % ctas >= of_first;
  }

  // Counts the CTAs of the first role. The first product then ends a ring less a band ahead; more CTAs would wait for slots.
  DEVICE uint32_t ctas_of_first_role() const {
    Stretches stretches(storage.queue.window);
    FoundTile none{};
    stretches.find(p.groups, 1, ~0u, none);  // counts all blocks
    const uint32_t blocks = stretches.tiles_before;
    if (blocks <= p.slots) return p.first_ctas;  // no slot is used again
    const float first = work_of(p, 1.f) * blocks;
    const float second = work_of(p.second, kMixesParts ? 1.22f : 1.f) * (blocks + kRasterGroup - p.slots);
    const uint32_t wanted = static_cast<uint32_t>(ptx::grid_size() * (first / (first + second)));
    return wanted > p.first_ctas ? p.first_ctas : wanted > 0 ? wanted : 1;
  }

  // The time of a block's tiles, in k-blocks of the first product: 1.4 for a tile's end, `k_block` (1.22 with parts) for a k-block.
  static DEVICE float work_of(const Product& of, float k_block) {
    return ceil_div(of.n, kBlockN) * (ceil_div(of.k, kBlockK) * k_block + 1.4f);
  }

  // Searches from the first group each time: there is time, and no register to remember where either product is.
  DEVICE bool find(Tile& tile, uint32_t wanted) const {
    const uint32_t tiles_n = ceil_div(product_of(p, tile).n, kBlockN);
    Stretches stretches(storage.queue.window);
    FoundTile found{};
    if (!stretches.find(p.groups, tiles_n, wanted, found)) return false;
    const TileIndex index = place_in_raster(found.number, found.stretch.tiles_m(), tiles_n);
    tile.row = found.stretch.first + index.m * kBlockM, tile.row_n = index.n * kBlockN;
    tile.block = (wanted - found.number) / tiles_n + index.m;
    tile.end_m = found.stretch.end, tile.group = found.stretch.group;
    return true;
  }

  // Finds the rows of a unit by its number; false past the last block. Units after a short block's last row are empty.
  DEVICE bool find_unit(Unit& unit, uint32_t wanted) const {
    Stretches stretches(storage.queue.window);
    FoundTile found{};
    unit.block = wanted / kUnitsOfBlock;
    if (!stretches.find(p.groups, 1, unit.block, found)) return false;
    const uint32_t of_block = wanted % kUnitsOfBlock * kRowsOfUnit;
    unit.row = found.stretch.first + found.number * kBlockM + of_block;
    const uint32_t left = unit.row < found.stretch.end ? found.stretch.end - unit.row : 0;
    unit.rows = left < kRowsOfUnit ? left : kRowsOfUnit;
    unit.row_of_ring = unit.block % p.slots * kBlockM + of_block;
    return true;
  }

  // Fetches the next part of a unit; false after its last part.
  DEVICE bool fetch_part(Unit& unit, uint8_t* staging) const {
    const Fetch fetch{p.rooms, p.meeting, p.k, staging};
    unit.is_begun = unit.is_begun ? fetch.go_on(unit) : fetch.begin(unit);
    if (unit.is_begun) return true;
    ptx::syncwarp();  // all lanes have stored
    if (ptx::lane_index() == 0) {
      ptx::fence_proxy_async_global();
      ptx::red_release_gpu_add_b32(count_of(p, Of::kFetched, unit.block), 1);
    }
    return false;
  }

  // Called by a storing warp before its tiles: fetches rows of the first band, whose slots are new. Its tiles need them anyway.
  DEVICE void fetch_first_band(uint8_t* staging) const {
    Unit unit{};
    for (uint32_t wanted; (wanted = claim(Next::kRowsOfAll)) < kUnitsOfBand && find_unit(unit, wanted);)
      while (unit.rows > 0 && fetch_part(unit, staging)) continue;
  }

  // Called by the finding warp: claims a unit if it has none, else fetches a part if its slot is free; false after the last row.
  DEVICE bool claim_or_fetch(Unit& unit) {
    if (unit.rows == 0) return claim_unit(unit);
    if (unit.block >= p.slots && !unit.is_begun) {
      const uint32_t* const whole = count_of(p, Of::kWhole, unit.block - p.slots);
      const uint32_t needed = ceil_div(p.n, kBlockN) * kPartsOfTile;
      if (!ptx::all_sync(ptx::lane_index() != 0 || ptx::ld_acquire_gpu_b32(whole) >= needed)) return true;
    }
    if (!fetch_part(unit, storage.staging)) unit.rows = 0;
    return true;
  }

  DEVICE bool claim_unit(Unit& unit) {
    if (rows_from == Next::kRowsOfAll) {
      const uint32_t wanted = claim(rows_from);
      if (wanted < kUnitsOfBand) return find_unit(unit, wanted);
      rows_from = Next::kRows;
    }
    return find_unit(unit, kUnitsOfBand + claim(rows_from));
  }
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile& tile) { return KBlocks(product_of(p, tile).k); }

// Where the rows of A end that may be loaded: slots have whole blocks.
DEVICE uint32_t end_of_a(const Tile& tile) { return tile.row_m + kBlockM; }
DEVICE uint32_t first_address_of(const Tile& tile) { return tile.row; }
// Scales of a row of A for a k-block. Only the middle may have several.
DEVICE uint32_t scale_parts_of(const Tile& tile) { return tile.is_second ? kScaleParts : 1; }

DEVICE uint32_t row_of_b(const Product& p, const Tile& tile, uint32_t column) {
  return tile.is_second ? column : row_of_gates(p, column);
}

// ---- B's scales, of gate and up or of two blocks in a line; no C

DEVICE const float* sfb_of(const Params& p, const Tile& tile) {
  return product_of(p, tile).sfb + tile.group * (tile.is_second ? p.second_sfb_stride : p.groups.sfb_stride);
}

DEVICE TileScales scales_of_b(const Params& p, const Tile& tile) {
  const Product& of = product_of(p, tile);
  TileScales scales(sfb_of(p, tile), of.sfb_stride_n, of.sfb_stride_k, tile.row_n, of.n, k_blocks_of(p, tile).end);
  if (tile.is_second) {
    scales.row[0] = sfb_of(p, tile) + uint64_t{tile.row_n / kScaleRowsOfB} * of.sfb_stride_n;
    scales.row[1] = scales.row[0] + (tile.row_n + kScaleRowsOfB < of.n ? of.sfb_stride_n : 0);
  }
  return scales;
}

DEVICE const uint8_t* c_of(const Params&, const Tile&) { return nullptr; }

#include "work/rows_of_tile.cuh"
