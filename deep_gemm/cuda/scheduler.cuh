// Which tiles a CTA computes, in which order. All roles of a CTA see the same tiles: each iterates the scheduler by itself,
// or, where rows are grouped, one warp does and deals them out.
#pragma once
#include "config.cuh"
#include "groups.cuh"
#include "ptx/cluster.cuh"
#include "ptx/warp.cuh"
#include "raster.cuh"

// Whether the last row of tiles ends where the rows do, instead of hanging out, and so computes some rows again, to the
// same bits. Not where C is added, which must happen once. A few rows alone are slow, because TMA has to fill the rest of
// their boxes with zeros: 72x2112x7168 took 14.2 us where m = 128 took 9.7, and 4 groups of about 256 rows took 12%
// longer (measured on an H200).
constexpr bool kMovesLastTileUp = !kIsKGrouped && !kWithC && !kAddsToD;

// Persistent: cluster i takes tiles i, i + clusters, ... of the raster; last, where kCutsLastTiles, perhaps half of another one.
// A cluster takes two neighbouring tiles: along n where it multicasts A, along m where it multicasts B. Where their
// number is odd the last one lies outside D, unless it is moved up; its loads give zeros and its stores are clipped.
// CTAs that split k take the same tile.
// Where rows are grouped, each stretch of a group's rows has a raster of its own, and the count goes on from one to the next.
struct Scheduler {
  uint32_t rows, tiles_m, tiles_n, next_tile;
  Stretches stretches;  // where rows are grouped

  DEVICE Scheduler(uint32_t m, uint32_t n, uint32_t* window)
      : rows(m),
        tiles_m(ceil_div(ceil_div(m, kBlockM), kClusterM)),
        tiles_n(ceil_div(ceil_div(n, kBlockN), kClusterN)),
        next_tile(ptx::block_index() / kClusterSize),
        stretches(window) {}

  // By a whole warp where rows are grouped.
  DEVICE bool next(const Groups& groups, Tile& tile) {
    Place place{};
    if constexpr (kGroups != kNoGroups) {
      if (!find(groups, place)) return false;
      rows = place.stretch.end - place.stretch.first;
      tiles_m = place.stretch.tiles_m();
    } else {
      place.tile = next_tile;
      if (next_tile >= tiles_m * tiles_n) return false;
    }
    const TileIndex index = place_in_raster(place.tile, tiles_m, tiles_n);
    tile.row_m = tile_of_cta<kClusterM>(index.m) * kBlockM;
    tile.row_n = tile_of_cta<kClusterN>(index.n) * kBlockN;
    if constexpr (kMovesLastTileUp) {
      // Tall tiles end low instead, so as to multiply few rows in vain, and are moved up to whole units of 64 rows.
      const uint32_t rows_of_units = ceil_div(rows - tile.row_m, 64) * 64;
      const uint32_t height = kHasShortTiles && rows_of_units < kBlockM ? rows_of_units : kBlockM;
      // TMA loads scales from 16 bytes on, so that up to 3 rows still hang out.
      const uint32_t last_row_m = rows > height ? ceil_div(rows - height, 4) * 4 : 0;
      tile.row_m = tile.row_m < last_row_m ? tile.row_m : last_row_m;
    }
    if constexpr (kGroups != kNoGroups)
      tile.row_m += place.stretch.first, tile.end_m = place.stretch.end, tile.group = place.stretch.group;
    if (place.is_second_half) tile.row_n += kUnitN;  // past the last column of D perhaps, as a cluster's tile
    tile.is_narrow = place.is_half;
    next_tile += ptx::grid_size() / kClusterSize;
    return true;
  }

  // Where this CTA's next tile is; or, in a last wave of no more tiles than half of the CTAs, the half of a tile that it takes:
  // two CTAs share each. Whether the wave has more is seen by its middle. The three are looked for in the order of their numbers.
  DEVICE bool find(const Groups& groups, Place& place) {
    const uint32_t cta = ptx::block_index(), wave = next_tile - cta, middle = wave + ptx::grid_size() / 2;
    // A search through ids would keep the first tile waiting.
    if (!kCutsLastTiles || (kGroups == kGroupIds && wave == 0)) return stretches.find(groups, tiles_n, next_tile, place);
    Place shared{};
    bool is_tile = false, is_shared = false;
#pragma unroll 1  // one code for all searches
    for (uint32_t search = 0; search < 3; ++search) {
      const bool is_low = (search == 1) == (next_tile < middle);
      const uint32_t number = search == 0 ? wave + cta / 2 : is_low ? next_tile : middle;
      Place found;
      if (!stretches.find(groups, tiles_n, number, found)) break;
      if (search == 0) shared = found, is_shared = true;
      if (number == next_tile) place = found, is_tile = true;
      if (number == middle) is_shared = false;
    }
    if (!is_shared) return is_tile;
    place = shared, place.is_half = true, place.is_second_half = cta % 2 == 1;
    return true;
  }
};

// The k-blocks of a tile that this CTA multiplies: all of them, or its share where a cluster splits k. Rank 0 has the first.
// Shares are whole runs, so that only the last run of all may be cut short.
struct KBlocks {
  uint32_t first, end;

  DEVICE explicit KBlocks(uint32_t k) : first(0), end(ceil_div(k, kBlockK)) {
    if constexpr (kClusterK > 1) {
      const uint32_t rank = ptx::cluster_rank(), runs = ceil_div(end, kRunKBlocks);
      const uint32_t end_of_share = runs * (rank + 1) / kClusterK * kRunKBlocks;
      first = runs * rank / kClusterK * kRunKBlocks;
      end = end_of_share < end ? end_of_share : end;
    }
  }
};
