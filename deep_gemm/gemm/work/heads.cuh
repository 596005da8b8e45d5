// Products of several heads, all of one shape: D[h] = C[h] + A[h] @ B[h].T. Each map has the head as its last
// dimension, so heads may be beside each other in the rows of wider matrices.
#pragma once
#include "config.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "slot.cuh"

struct Heads {
  uint64_t sfb_stride, c_stride;  // from one head to the next, in elements
  uint32_t count;
};

struct Params : Product {
  Heads heads;
};

DEVICE uint32_t planes_of(const Params& p) { return p.heads.count; }

DEVICE void prefetch_operand_maps(const Params& p) { prefetch_maps(p); }

#include "work/planes.cuh"

DEVICE KBlocks k_blocks_of(const Params& p, const Tile&) { return KBlocks(p.k); }

// ---- Loads

struct TileLoad : LoadOfBoxes<Params, Tile> {
  using LoadOfBoxes::LoadOfBoxes;

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t k) const {
    load_operands(slot, k, tile.plane);
    load_scales(slot, k_block, tile.plane);
  }
};

// ---- B's scales, C and D

DEVICE const float* sfb_of(const Params& p, const Tile& tile) { return p.sfb + tile.plane * p.heads.sfb_stride; }
DEVICE const uint8_t* c_of(const Params& p, const Tile& tile) {
  return p.c + tile.plane * p.heads.c_stride * kOutputBytes;
}
DEVICE uint32_t skipped_scales(const Tile&) { return 0; }
