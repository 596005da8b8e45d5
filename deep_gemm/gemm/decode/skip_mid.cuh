// One product whose columns are stored in the parts of heads in D: see decode/product.cuh and head_parts.cuh.
#pragma once
#include "config.cuh"
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "head_parts.cuh"

struct Params : DecodeMaps, DecodeProduct {
  HeadParts heads;
};

static_assert(!kWithC, "D of heads is the product alone");

using CtaWork = Work;

using Tiles = OneTile<CtaWork>;

DEVICE const Params& product_of(const Params& p, const CtaWork&) { return p; }

template <bool kIsB>
DEVICE void load_box(const ptx::TensorMap* map, uint64_t* full, uint8_t* destination, uint32_t k, uint32_t row,
                     const CtaWork&) {
  ptx::tma_load_2d(map, full, destination, k, row);
}

// Adds the middles of all heads whose right part begins at or before this column.
DEVICE uint32_t column_of_d(const Params& p, uint32_t column) {
  return column + p.heads.before(column + p.heads.columns - p.heads.left) * p.heads.mid;
}
