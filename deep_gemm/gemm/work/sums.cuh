// A sum over products: D = sum over s of A[s] @ B[s].T. Its depth is the sum of the products' depths. Its k-blocks are
// divided into slices. Each slice has its own plane in D, an FP32 workspace; sum_slices.cuh adds up the planes.
//
// Maps of A and B have the product as their last dimension. k is whole k-blocks, so each k-block is in one product.
#pragma once
#include "config.cuh"
#include "operand.cuh"
#include "params.cuh"
#include "slot.cuh"

struct Sum {
  uint32_t products, slices;
};

struct Params : Product {
  Sum sum;
};

DEVICE uint32_t planes_of(const Params& p) { return p.sum.slices; }

#include "work/planes.cuh"

DEVICE void prefetch_operand_maps(const Params& p) { prefetch_maps(p); }

// All slices have the same number of k-blocks, or one more. The multiplications here may need more than 32 bits.
DEVICE KBlocks k_blocks_of(const Params& p, const Tile& tile) {
  const uint64_t k_blocks = static_cast<uint64_t>(p.sum.products) * (p.k / kBlockK);
  return KBlocks(static_cast<uint32_t>(k_blocks * tile.plane / p.sum.slices),
                 static_cast<uint32_t>(k_blocks * (tile.plane + 1) / p.sum.slices));
}

// ---- Loads

struct TileLoad : LoadOfBoxes<Params, Tile> {
  uint32_t k_blocks_of_product;

  DEVICE TileLoad(const Params& p, const Tile& tile) : LoadOfBoxes(p, tile), k_blocks_of_product(p.k / kBlockK) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t) const {
    const uint32_t product = k_block / k_blocks_of_product;
    load_operands(slot, (k_block - product * k_blocks_of_product) * kBlockK, product);
  }
};

DEVICE const uint8_t* c_of(const Params& p, const Tile&) { return p.c; }  // unused: slices have no C
