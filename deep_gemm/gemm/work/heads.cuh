// Products of several heads, all of one shape: D[h] = C[h] + A[h] @ B[h].T. Each map has the head as its last dimension, so
// heads may lie beside each other in the rows of wider matrices.
#pragma once
#include "config.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "ptx/tma.cuh"
#include "ring.cuh"
#include "slot.cuh"

struct Heads {
  uint64_t sfb_stride, c_stride;  // from head to head, in elements
  uint32_t count;
};

struct Params : Product {
  Heads heads;
};

DEVICE uint32_t planes_of(const Params& p) { return p.heads.count; }

DEVICE void prefetch_operand_maps(const Params& p) {
  ptx::prefetch_tensormap(&p.map_a);
  ptx::prefetch_tensormap(&p.map_b);
  if constexpr (kHasScales) ptx::prefetch_tensormap(&p.map_sfa);
  if constexpr (kSfbIsPerRow) ptx::prefetch_tensormap(&p.map_sfb);
}

#include "work/planes.cuh"

DEVICE KBlocks k_blocks_of(const Params& p, const Tile&) { return KBlocks(p.k); }

// ---- Loads

struct TileLoad {
  const Params& p;
  const Tile& tile;
  uint32_t slot_bytes;

  DEVICE TileLoad(const Params& p_, const Tile& tile_) : p(p_), tile(tile_), slot_bytes(bytes_of_slot(p_, tile_)) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t k) const {
    load_operand<kAIsMnMajor, kBlockM, kClusterN>(&p.map_a, slot.full, slot.a, k, tile.row_m, tile.plane);
    load_operand<kBIsMnMajor, kBlockN, kClusterM>(&p.map_b, slot.full, slot.b, k, tile.row_n, tile.plane);
    if constexpr (kHasScales) load_scales(slot, k_block);
  }

  DEVICE void load_scales(const Slot& slot, uint32_t k_block) const {
    ptx::tma_load_3d(&p.map_sfa, slot.full, slot.scales, tile.row_m, k_block, tile.plane);
    if constexpr (kSfbIsPerRow)
      ptx::tma_load_3d(&p.map_sfb, slot.full, slot.scales + kScaleRows, tile.row_n, k_block, tile.plane);
  }
};

// ---- B's scales, C and D

DEVICE const float* sfb_of(const Params& p, const Tile& tile) { return p.sfb + tile.plane * p.heads.sfb_stride; }
DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) {
  return p.c + tile.plane * p.heads.c_stride * kOutputBytes;
}
DEVICE uint32_t skipped_scales(const Tile&) { return 0; }
