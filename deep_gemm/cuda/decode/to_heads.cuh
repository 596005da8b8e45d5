// D has the columns of a product in heads: cuda/heads.cuh.
#pragma once
#include "config.cuh"
#include "decode/product.cuh"
#include "heads.cuh"

struct Params : DecodeProduct {
  Heads heads;
};

static_assert(!kWithC, "D of heads is the product alone");

// Where a column of the product lies in D: behind the middles of all heads whose right part it has reached.
DEVICE uint32_t column_of_d(const Params& p, uint32_t column) {
  return column + p.heads.before(column + p.heads.columns - p.heads.left) * p.heads.mid;
}
