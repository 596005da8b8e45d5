// Products of several heads, all of one shape: see decode/product.cuh. Heads are the last dimension of the maps. All
// tiles of a head precede the next head's tiles.
#pragma once
#include "decode/product.cuh"
#include "decode/tile.cuh"

struct Heads {
  uint64_t sfa_stride, sfb_stride, d_stride, c_stride;  // from one head to the next, in elements
};

struct Params : DecodeMaps, DecodeProduct {
  Heads heads;
};

struct CtaWork : Work {
  uint32_t head;

  CtaWork() = default;
  DEVICE explicit CtaWork(const Params& p) : Work(p) {
    const uint32_t tiles_n = ceil_div(p.n, kBlockN), tile_n = row_n / kBlockN;  // counted through all heads
    head = tile_n / tiles_n;
    row_n = (tile_n - head * tiles_n) * kBlockN;
  }
};

using Tiles = OneTile<CtaWork>;

DEVICE DecodeProduct product_of(const Params& p, const CtaWork& work) {
  DecodeProduct product = p;
  product.sfa += work.head * p.heads.sfa_stride;
  product.sfb += work.head * p.heads.sfb_stride;
  product.d += work.head * p.heads.d_stride * kOutputBytes;
  product.c += work.head * p.heads.c_stride * kOutputBytes;
  return product;
}

template <bool kIsB>
DEVICE void load_box(const ptx::TensorMap* map, uint64_t* full, uint8_t* destination, uint32_t k, uint32_t row,
                     const CtaWork& work) {
  ptx::tma_load_3d(map, full, destination, k, row, work.head);
}

DEVICE uint32_t column_of_d(const DecodeProduct&, uint32_t column) { return column; }
