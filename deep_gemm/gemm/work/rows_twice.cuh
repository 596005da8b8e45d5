// Both products of experts' rows in one stream of tasks. The first activates: its D is the middle, A of the second product,
// whose rows go to addresses. A task is a tile of either. Tasks have a fixed order:
//
//   first product    0 .. lag - 1   a wave        a wave        ...
//   second product                        a wave        a wave  ...      a wave: a tile for each CTA
//
// CTAs claim tasks in this order. Waves keep them in step, so that CTAs which need the same rows of B load these at one time. The storing warps count a tile of the first product, once its warpgroup has written the
// middle, for the block of rows that the tile is of. The loading thread of a tile of the second one waits until its block is
// whole. All tiles of a block come before the first task that waits for it, if `lag` has room for a band of the raster:
// so a CTA waits only for tasks that are running or over, whether or not all CTAs run at a time.
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
#include "work/tile_queue.cuh"
#include SCALES

struct Counts {
  uint32_t claimed, claimed_second, over;  // tasks that CTAs have claimed, and CTAs that wait for no block any more
  uint32_t whole[1];                       // of each block of rows: how many parts of its tiles of the first product have been written
};

struct Params : Product {
  Groups groups;
  Activation activation;
  Product second;
  uint64_t second_sfb_stride;  // of groups, in elements
  Counts* counts;              // zeros before and after
  uint32_t blocks;             // that there may be
  uint32_t lag;                // tiles of the first product before the first tile of the second
  uint32_t first_ctas;         // CTAs that take tiles of the first product as long as there are any; 0: all take turns
};

struct WorkStorage {
  TileQueue queue;

  DEVICE void init() { queue.init(kNumMathWarps + kStoringWarps + 1); }  // all roles but the dealing warp take
};

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row
  uint32_t row_n;  // first column of the product
  uint32_t end_m;  // where the group's rows end
  uint32_t group;
  uint32_t block = 0;          // the number of its block of rows
  uint32_t stored_before = 0;  // how many of its first rows the tile above stores
  bool is_second = false;      // it is a tile of the second product
  static constexpr bool is_narrow = false;
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
// A tile's second word in the queue holds its column of tiles, then its block; the last one holds the group, then
// `stored_before`. Its highest bit says which product.
constexpr uint32_t kColumnBits = 12, kGroupBits = 24;
static_assert(kBlockM <= 128, "a count of rows in 7 bits");

struct Tiles {
  const Params& p;
  WorkStorage& storage;
  uint32_t number = 0;  // of the tiles that this thread has dealt or taken
  bool takes_first = true;

  DEVICE Tiles(const Params& p_, WorkStorage& storage_) : p(p_), storage(storage_) {}

  // By the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; take<false>(tile);) load(tile);
    // The last CTA to come here leaves zeros: all tasks are claimed, and all blocks have been waited for.
    if (ptx::atom_add_acq_rel_b32(&p.counts->over, 1) + 1 < ptx::grid_size()) return;
    for (uint32_t block = 0; block < p.blocks; ++block) ptx::st_global_b32(&p.counts->whole[block], 0);
    ptx::st_global_b32(&p.counts->claimed, 0), ptx::st_global_b32(&p.counts->claimed_second, 0), ptx::st_global_b32(&p.counts->over, 0);
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
    tile = {words.x,
            (words.y & ((1u << kColumnBits) - 1)) * kBlockN,
            words.z,
            words.w & ((1u << kGroupBits) - 1),
            words.y >> kColumnBits,
            words.w >> kGroupBits & 127,
            words.w >> 31 != 0};
    storage.queue.give_back(number, dealt.x, !kIsWarp || ptx::lane_index() == 0);
    ++number;
    return tile.end_m != kNoMoreTiles.end_m;
  }

  DEVICE static uint32_t claim(uint32_t* claimed) {
    return ptx::shfl_sync(ptx::lane_index() == 0 ? ptx::atom_add(claimed, 1) : 0, 0);
  }

  // Claims the next task that is there.
  DEVICE bool find_next(Tile& tile) {
    const uint32_t columns_of_first = ceil_div(p.n, kBlockN), columns_of_second = ceil_div(p.second.n, kBlockN), lag = p.lag;
    const auto second_among = [&](uint32_t waves) { return waves * columns_of_second / (columns_of_first + columns_of_second); };
    storage.queue.wait_until_free(number);  // a task is claimed late, so that CTAs end together
    if (p.first_ctas > 0) {
      if (ptx::block_index() >= p.first_ctas && ptx::ld_relaxed_gpu_b32(&p.counts->claimed) >= lag) takes_first = false;
      tile.is_second = false;
      if (takes_first && find(tile, columns_of_first, claim(&p.counts->claimed))) return true;
      takes_first = false, tile.is_second = true;
      return find(tile, columns_of_second, claim(&p.counts->claimed_second));
    }
    while (true) {
      const uint32_t task = claim(&p.counts->claimed);
      const uint32_t behind_lag = task < lag ? 0 : task - lag, wave = behind_lag / ptx::grid_size();
      const uint32_t waves_of_second = second_among(wave);  // before this one
      tile.is_second = task >= lag && second_among(wave + 1) > waves_of_second;
      if (tile.is_second)
        return find(tile, columns_of_second, behind_lag - (wave - waves_of_second) * ptx::grid_size());
      if (find(tile, columns_of_first, task - waves_of_second * ptx::grid_size())) return true;
    }
  }

  // From the first group on each time: there is time, and no register to remember where either product is.
  DEVICE bool find(Tile& tile, uint32_t tiles_n, uint32_t wanted) const {
    Stretches stretches(storage.queue.window);
    FoundTile found{};
    if (!stretches.find(p.groups, tiles_n, wanted, found)) return false;
    const uint32_t rows = found.stretch.end - found.stretch.first;
    const TileIndex index = place_in_raster(found.number, found.stretch.tiles_m(), tiles_n);
    tile.row_m = index.m * kBlockM;
    tile.row_n = index.n * kBlockN;
    tile.block = (wanted - found.number) / tiles_n + index.m;
    move_up(tile.row_m, rows, kBlockM);
    tile.stored_before = index.m * kBlockM - tile.row_m;
    tile.row_m += found.stretch.first, tile.end_m = found.stretch.end, tile.group = found.stretch.group;
    return true;
  }
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile& tile) { return KBlocks(product_of(p, tile).k); }

// ---- The middle: written by a warpgroup, read by TMA of any CTA

DEVICE void count_written(const Params& p, const Tile& tile) {
  ptx::fence_proxy_async_global();
  ptx::red_release_gpu_add_b32(&p.counts->whole[tile.block], 1);
}

DEVICE void wait_for_operands(const Params& p, const Tile& tile) {
  if (!tile.is_second) return;
  const uint32_t parts = ceil_div(p.n, kBlockN) * (tile.row_m + 64 < tile.end_m ? 2 : 1);
  while (ptx::ld_acquire_gpu_b32(&p.counts->whole[tile.block]) < parts) {
  }
  ptx::fence_proxy_async_global();
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
  TileScales scales(sfb_of(p, tile), of.sfb_stride_n, of.sfb_stride_k, tile.row_n, of.n, k_blocks_of(p, tile).end);
  if (tile.is_second) {
    scales.row[0] = sfb_of(p, tile) + uint64_t{tile.row_n / kScaleRowsOfB} * of.sfb_stride_n;
    scales.row[1] = scales.row[0] + (tile.row_n + kScaleRowsOfB < of.n ? of.sfb_stride_n : 0);
  }
  return scales;
}

DEVICE const uint8_t* c_of(const Params&, const Tile&) { return nullptr; }

#include "work/rows_of_tile.cuh"
