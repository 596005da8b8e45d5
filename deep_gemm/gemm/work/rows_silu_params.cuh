// Rows of groups whose product, of gate and up, is activated. D holds the FP8 values.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"

struct Activation {
  const float* row_weights;  // a factor for each row; null: none
  float* scales;             // [columns of activations / 64, scales_pitch], a column for each row
  uint32_t scales_pitch;
  float limit;  // gates count as at most this, ups as within +-this
};

// The row of B that is a column of the product: kGateColumns of gate, and as many of up, in turn. Where these are 128, B has
// all rows of gate first.
DEVICE uint32_t row_of_b(const Product& p, uint32_t column) {
  if constexpr (kGateColumns == 8) return column;
  return column / 256 * 128 + column % 128 + (column % 256 < 128 ? 0 : p.n / 2);
}

struct Params : Product {
  Groups groups;
  Activation activation;
};
