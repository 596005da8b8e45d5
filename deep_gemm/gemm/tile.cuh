// Tiles of D: kBlockM x kBlockN elements, each computed by one CTA, or by the CTAs of a cluster that split k.
//
// Rows of a tile are dealt to the math warpgroups in turn, 64 at a time; kUnitStride is the rows of one round. A
// warpgroup multiplies its part in units of 64 x kUnitN: first all units of the same rows, then the next rows.
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/warp.cuh"

// A unit's first row and column, counted from the warpgroup's first row and the tile's first column.
DEVICE_CONSTEXPR uint32_t row_of_unit(uint32_t unit) { return unit / kUnitsAlongN * kUnitStride; }
DEVICE_CONSTEXPR uint32_t column_of_unit(uint32_t unit) { return unit % kUnitsAlongN * kUnitN; }

// A piece of a k-block is multiplied from zero, and promoted: a unit, or its part under one scale of A and one of B.
template <uint32_t kOfUnit>
DEVICE_CONSTEXPR uint32_t unit_of_piece(uint32_t piece) {
  return piece / kOfUnit;
}
template <uint32_t kOfUnit>
DEVICE_CONSTEXPR uint32_t part_of_piece(uint32_t piece) {
  return piece % kOfUnit;
}
// The index of a part's scale, if A, or B, has `scales` scales for a k-block.
DEVICE_CONSTEXPR uint32_t scale_of_part(uint32_t part, uint32_t scales) { return part * scales / kParts; }

// ---- The order of tiles

struct TileIndex {
  uint32_t m, n;
};

// Consecutive tiles go down `max_height` tiles along m before they move on along n. So the tiles in flight share their
// rows of A and of B in the L2.
DEVICE TileIndex place_in_raster(uint32_t number, uint32_t tiles_m, uint32_t tiles_n, uint32_t max_height = kRasterGroup) {
  const uint32_t group_size = max_height * tiles_n;
  const uint32_t first_m = number / group_size * max_height;
  const uint32_t height = tiles_m - first_m < max_height ? tiles_m - first_m : max_height;
  const uint32_t in_group = number % group_size;
  return {first_m + in_group % height, in_group / height};
}

// A cluster computes kCtas neighbouring tiles along one side at a time. Returns the index of this CTA's tile.
template <uint32_t kCtas>
DEVICE uint32_t tile_of_cta(uint32_t index_of_cluster) {
  return index_of_cluster * kCtas + (kCtas > 1 ? ptx::cluster_rank() : 0);
}

// Sets the first row of a tile of `height` rows. The last tile begins earlier, to end at the last row, and computes
// some rows again, to the same bits. If it overhung, TMA would fill the outside rows with zeros, which takes longer
// than to load rows. Loads of scales begin at multiples of 16 bytes, so up to 3 rows still overhang.
DEVICE void move_up(uint32_t& row_m, uint32_t rows, uint32_t height) {
  const uint32_t last_row_m = rows > height ? ceil_div(rows - height, 4) * 4 : 0;
  row_m = row_m < last_row_m ? row_m : last_row_m;
}

// The tiles of matrices of one shape, which CTAs find by themselves: cluster i computes tiles i, i + clusters, ...
struct Raster {
  uint32_t rows, tiles_m, tiles_n, next_tile;

  DEVICE Raster(uint32_t m, uint32_t n)
      : rows(m),
        tiles_m(ceil_div(ceil_div(m, kBlockM), kClusterM)),
        tiles_n(ceil_div(ceil_div(n, kBlockN), kClusterN)),
        next_tile(ptx::block_index() / kClusterSize) {}

  // Sets a tile's position in its matrix, and moves on to the next tile.
  template <typename Tile>
  DEVICE void take(Tile& tile, uint32_t number_in_matrix) {
    const TileIndex index = place_in_raster(number_in_matrix, tiles_m, tiles_n);
    tile.row_m = tile_of_cta<kClusterM>(index.m) * kBlockM;
    tile.row_n = tile_of_cta<kClusterN>(index.n) * kBlockN;
    // C must be added once, so no row is computed twice. If rows are contiguous, boxes begin at multiples of 16 bytes.
    if constexpr (!kWithC && !kAddsToD && !kAIsMnMajor) move_up(tile.row_m, rows, kBlockM);
    next_tile += ptx::grid_size() / kClusterSize;
  }

  DEVICE void find_for_others(uint32_t) {}

  template <typename Tile>
  DEVICE void finish(Tile&) {}
};

// ---- The k-blocks of a tile

// All k-blocks of a tile, or this CTA's share if a cluster splits k: rank 0 has the first. Shares are whole runs, so
// only the last run of all may be short.
struct KBlocks {
  uint32_t first, end;

  DEVICE KBlocks(uint32_t first_, uint32_t end_) : first(first_), end(end_) {}

  DEVICE explicit KBlocks(uint32_t k) : first(0), end(ceil_div(k, kBlockK)) {
    if constexpr (kClusterK > 1) {
      const uint32_t rank = ptx::cluster_rank(), runs = ceil_div(end, kRunKBlocks);
      const uint32_t end_of_share = runs * (rank + 1) / kClusterK * kRunKBlocks;
      first = runs * rank / kClusterK * kRunKBlocks;
      end = end_of_share < end ? end_of_share : end;
    }
  }

  // True if this CTA has no k-blocks: there may be fewer runs than CTAs.
  DEVICE bool are_none() const { return kClusterK > 1 && first == end; }
};

// ---- A warpgroup's share of a tile: all of its units. work/rows.cuh has another kind of share.

using Totals = float[kUnitsPerWarpgroup][kUnitN / 2];

// If the tensor cores add up a tile's sums, ptxas of CUDA 12.8 must see that the sums begin as zeros and end with the
// tile, or all WGMMAs wait for each other (note C7515). So with 12.8 a tile is stored before the next one is found.
constexpr bool kStoresAtOnce = !kHasScales && kCudaRelease < 1209;

struct WholeShare {
  bool is_any = false;  // false before the first tile
  static constexpr bool is_part = false;

  template <typename Tile>
  DEVICE void set(const Tile&, uint32_t) {
    is_any = true;
  }

  // Calls `use` with the totals of the units that were computed.
  template <typename Use>
  DEVICE void with(Totals& total, const Use& use) const {
    use(total);
  }
};
