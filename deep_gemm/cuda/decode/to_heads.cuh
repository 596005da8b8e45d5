// D has the columns of a product in heads, with columns between their parts that nobody writes: epilogue/to_heads.cuh.
#pragma once
#include "config.cuh"
#include "decode/product.cuh"

struct Params : DecodeProduct {
  uint32_t left, head, mid;  // columns of a left part, of both parts, and between these
};

static_assert(!kWithC, "D of heads is the product alone");

// Where a column of the product lies in D: behind the middles of all heads whose right part it has reached.
DEVICE uint32_t column_of_d(const Params& p, uint32_t column) {
  return column + (column + p.head - p.left) / p.head * p.mid;
}
