// Products of several heads, all of one shape: D[h] = C[h] + A[h] @ B[h].T. Each map has the head as its last dimension, so
// heads may lie beside each other in the rows of wider matrices. Tiles of a head follow each other, and those of the next
// head follow them; else this is work/dense.cuh.
//
// A cluster that multicasts takes two neighbouring tiles of a head: along n if it shares A, along m if it shares B.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"

struct Heads {
  uint64_t sfb_stride, c_stride;  // from head to head, in elements
  uint32_t count;
};

struct Params : Product {
  Heads heads;
};

struct WorkStorage {
  DEVICE void init() {}
};

DEVICE void prefetch_operand_maps(const Params& p) {
  ptx::prefetch_tensormap(&p.map_a);
  ptx::prefetch_tensormap(&p.map_b);
  if constexpr (kHasScales) ptx::prefetch_tensormap(&p.map_sfa);
  if constexpr (kSfbIsPerRow) ptx::prefetch_tensormap(&p.map_sfb);
}

// ---- Tiles

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
  uint32_t head;
};

using TileToLoad = Tile;

struct Tiles {
  uint32_t rows, tiles_m, tiles_n, heads, next_tile;

  DEVICE Tiles(const Params& p, WorkStorage&)
      : rows(p.m),
        tiles_m(ceil_div(ceil_div(p.m, kBlockM), kClusterM)),
        tiles_n(ceil_div(ceil_div(p.n, kBlockN), kClusterN)),
        heads(p.heads.count),
        next_tile(ptx::block_index() / kClusterSize) {}

  // By the loading thread, or a math warp.
  DEVICE bool next(Tile& tile) {
    const uint32_t tiles_of_head = tiles_m * tiles_n;
    if (next_tile >= tiles_of_head * heads) return false;
    tile.head = next_tile / tiles_of_head;
    const TileIndex index = place_in_raster(next_tile - tile.head * tiles_of_head, tiles_m, tiles_n);
    tile.row_m = tile_of_cta<kClusterM>(index.m) * kBlockM;
    tile.row_n = tile_of_cta<kClusterN>(index.n) * kBlockN;
    // C must be added once, so no row may be computed again. Where rows are contiguous, boxes begin at whole 16 bytes.
    if constexpr (!kWithC && !kAddsToD && !kAIsMnMajor) move_up(tile.row_m, rows, kBlockM);
    next_tile += ptx::grid_size() / kClusterSize;
    return true;
  }

  // By the loading thread.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    for (Tile tile; next(tile);) load(tile);
  }

  DEVICE void find_for_others(uint32_t) {}

  DEVICE void finish(Tile&) {}
};

DEVICE KBlocks k_blocks_of(const Params& p, const Tile&) { return KBlocks(p.k); }

using Share = WholeShare;

// ---- Loads

// Boxes of A and its scales have no more rows than A, as in work/dense.cuh.
DEVICE uint32_t bytes_of_slot(const Params& p, const Tile&) {
  const uint32_t rows = (!kAIsMnMajor && p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA) * kClusterN;
  const uint32_t scales = kHasScales && p.m < kBlockM ? ceil_div(p.m, 4) * 4 : kBlockM;  // 16 bytes are the least that TMA loads
  return kSlotBytes - (kBlockM - rows) * kLineBytes - (kBlockM - scales) * 4;
}

struct TileLoad {
  const Params& p;
  const Tile& tile;
  uint32_t slot_bytes;

  DEVICE TileLoad(const Params& p_, const Tile& tile_) : p(p_), tile(tile_), slot_bytes(bytes_of_slot(p_, tile_)) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t k) const {
    load_operand<kAIsMnMajor, kBlockM, kClusterN>(&p.map_a, slot.full, slot.a, k, tile.row_m, tile.head);
    load_operand<kBIsMnMajor, kBlockN, kClusterM>(&p.map_b, slot.full, slot.b, k, tile.row_n, tile.head);
    if constexpr (kHasScales) load_scales(slot, k_block);
  }

  DEVICE void load_scales(const Slot& slot, uint32_t k_block) const {
    ptx::tma_load_3d(&p.map_sfa, slot.full, slot.scales, tile.row_m, k_block, tile.head);
    if constexpr (kSfbIsPerRow)
      ptx::tma_load_3d(&p.map_sfb, slot.full, slot.scales + kScaleRows, tile.row_n, k_block, tile.head);
  }
};

// ---- B's scales, C and D

DEVICE const float* sfb_of(const Params& p, const Tile& tile) { return p.sfb + tile.head * p.heads.sfb_stride; }
DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) {
  return p.c + tile.head * p.heads.c_stride * kOutputBytes;
}
DEVICE uint32_t skipped_scales(const Tile&) { return 0; }

// Where the panels of a tile lie in D.
struct Destination {
  const Params& p;
  Span span;
  uint32_t head;

  DEVICE Destination(const Params& p_, const Tile& tile, uint32_t) : p(p_), span(p_.n), head(tile.head) {}

  DEVICE void store(const uint8_t* panel, uint32_t column, uint32_t row) const {
    if constexpr (kPanelIsWide)
      store_panel(&p.map_d, panel, 0, span.at_column(column), row, head);
    else
      store_panel(&p.map_d, panel, column, row, head);
  }

  DEVICE void prefetch(uint32_t column, uint32_t row) const {
    if constexpr (kPanelIsWide)
      ptx::tma_prefetch_4d(&p.map_d, 0, span.at_column(column), row, head);
    else
      ptx::tma_prefetch_3d(&p.map_d, column, row, head);
  }
};
