// Products of several groups along k of any depths, perhaps known to the GPU alone: D[g] = C[g] + A_g.T @ B_g. The
// groups' rows of A [rows, m] and B [rows, n] are consecutive, so one map of each serves all groups, as in k_parts.cuh.
//
// A CTA reads the depths when it starts, and writes to shared memory where each group begins, the deepest group first.
// So the host does not wait, and a captured launch uses the depths that are in memory when it is replayed.
//
// A group's last k-block ends where the next group's rows begin. For that, the maps have two dimensions for rows, and a
// step along either one leads to the next row:
//
//   element (column, i, row)  is  operand[row + i][column],  0 <= i
//
// A box of kBlockK rows that begins at i = -zeros has `zeros` rows of zeros, followed by the group's last rows. Rows
// are shifted alike in A and in B, so their products have the same sum.
#pragma once
#include "config.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "slot.cuh"
#include "tile.cuh"

static_assert(kAIsMnMajor && kBIsMnMajor, "rows that follow each other along k");

// Groups of one launch. The host launches again for further groups.
constexpr uint32_t kMostCounted = 128;
constexpr uint32_t kMostInlineCounts = 768;

struct KCounts {
  const int32_t* counts;  // the groups' depths; null: the depths are in inline_counts
  uint64_t c_stride;      // from one group's C to the next, in elements
  uint32_t groups, rows;  // groups of the whole call; rows of A and B
  uint32_t first, count;  // this launch's groups, in order of depth
  int32_t inline_counts[kMostInlineCounts];
};

struct Params : Product {
  KCounts depths;
};

struct WorkStorage {
  alignas(16) ptx::Uint4 parts[kMostCounted];  // first row, rows, plane of D

  DEVICE void init() {}
};

DEVICE void prefetch_operand_maps(const Params& p) { prefetch_maps(p); }

// ---- Depths

template <bool kIsInline>
DEVICE uint32_t count_of(const KCounts& depths, uint32_t group) {
  int32_t count;
  if constexpr (kIsInline) count = depths.inline_counts[group]; else count = ptx::ld_global_i32(depths.counts + group);
  return count < 0 ? 0 : static_cast<uint32_t>(count);
}

// Called by one thread: stores where a group begins, at its index in order of depth, if this launch has that index.
template <bool kIsInline>
DEVICE void place_part(const KCounts& depths, uint32_t group, WorkStorage& storage) {
  constexpr uint32_t kEach = 16;  // loads in flight at a time
  const uint32_t own = count_of<kIsInline>(depths, group);
  uint32_t row = 0, place = 0;
#pragma unroll 1
  for (uint32_t other = 0; other < depths.groups; other += kEach) {
    uint32_t counts[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t last = depths.groups - 1;
      counts[i] = count_of<kIsInline>(depths, other + i < last ? other + i : last);
    }
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const bool is_before = other + i < group;
      const bool is_ahead = (counts[i] > own) | ((counts[i] == own) & is_before);  // no branches: all loads together
      row += is_before ? counts[i] : 0;
      place += (other + i < depths.groups) & is_ahead;
    }
  }
  // Limits the size, so that no depths lead outside the operands.
  const uint32_t rest = row < depths.rows ? depths.rows - row : 0;
  if (place >= depths.first && place - depths.first < depths.count)
    ptx::st_shared_v4_b32(&storage.parts[place - depths.first], row, own < rest ? own : rest, group, 0);
}

// Called by all threads of the CTA.
DEVICE void place_parts(const KCounts& depths, WorkStorage& storage) {
  for (uint32_t group = ptx::thread_index(); group < depths.groups; group += kNumThreads) {
    if (depths.counts == nullptr)
      place_part<true>(depths, group, storage);
    else
      place_part<false>(depths, group, storage);
  }
  ptx::syncthreads();
}

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
  uint32_t num_k_blocks;
  uint32_t group;  // plane of C and D
};

// A tile for the loading thread, which must also know the first row of the group's part of k, and the number of rows.
struct TileToLoad : Tile {
  uint32_t first_k, k;
};

struct Tiles : Raster {
  const KCounts& depths;
  WorkStorage& storage;

  DEVICE Tiles(const Params& p, WorkStorage& storage_) : Raster(p.m, p.n), depths(p.depths), storage(storage_) {
    place_parts(depths, storage);
  }

  // Called by one thread, or by a warp.
  DEVICE bool find(TileToLoad& tile) {
    const uint32_t tiles_of_part = tiles_m * tiles_n;
    if (next_tile >= tiles_of_part * depths.count) return false;
    const uint32_t number = next_tile / tiles_of_part;
    const ptx::Uint4 part = ptx::ld_shared_v4_b32(&storage.parts[number]);
    take(tile, next_tile - number * tiles_of_part);
    tile.num_k_blocks = ceil_div(part.y, kBlockK);
    tile.group = part.z;
    tile.first_k = part.x;
    tile.k = part.y;
    return !kAddsToD || tile.num_k_blocks != 0;  // later groups have no depth either, so they add nothing
  }

  // Called by a math warp.
  DEVICE bool next(Tile& tile) {
    TileToLoad found;
    if (!find(found)) return false;
    tile = found;
    tile.num_k_blocks = ptx::shfl_sync(found.num_k_blocks, 0);  // tells the compiler that it is uniform
    return true;
  }

  // Called by the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (TileToLoad tile; find(tile);) load(tile);
  }
};

DEVICE KBlocks k_blocks_of(const Params&, const Tile& tile) { return KBlocks(0, tile.num_k_blocks); }

using Share = WholeShare;

// ---- Loads

struct TileLoad : LoadOfBoxes<Params, TileToLoad> {
  using LoadOfBoxes::LoadOfBoxes;

  DEVICE void load_slot(const Slot& slot, uint32_t, uint32_t k_of_part) const {
    const uint32_t rest = tile.k - k_of_part, zeros = rest < kBlockK ? kBlockK - rest : 0, first = 0 - zeros;
    load_operands(slot, first, tile.first_k + k_of_part);
  }
};

// ---- C and D

DEVICE uint32_t plane_of(const Params&, const Tile& tile) { return tile.group; }

DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) { return p.c + tile.group * p.depths.c_stride * kOutputBytes; }

#include "epilogue/to_plane.cuh"
