// One product: see decode/product.cuh.
#pragma once
#include "decode/product.cuh"
#include "decode/tile.cuh"

struct Params : DecodeMaps, DecodeProduct {};

using CtaWork = Work;

using Tiles = OneTile<CtaWork>;

DEVICE const DecodeProduct& product_of(const Params& p, const CtaWork&) { return p; }

template <bool kIsB>
DEVICE void load_box(const ptx::TensorMap* map, uint64_t* full, uint8_t* destination, uint32_t k, uint32_t row,
                     const CtaWork&) {
  ptx::tma_load_2d(map, full, destination, k, row);
}

DEVICE uint32_t column_of_d(const DecodeProduct&, uint32_t column) { return column; }
