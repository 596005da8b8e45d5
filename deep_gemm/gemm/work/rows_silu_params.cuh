// Rows of groups whose product, of gate and up, is activated. D holds the FP8 values, or BF16 where there are no scales.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"

// The row of B for a column of the product. In the product kGateColumns of gate and kGateColumns of up alternate. B's
// rows alternate in the same way if kGateColumns is 8; if it is larger, all rows of gate come first.
DEVICE uint32_t row_of_b(const Product& p, uint32_t column) {
  if constexpr (kGateColumns == 8) return column;
  constexpr uint32_t kTurn = 2 * kGateColumns;
  return column / kTurn * kGateColumns + column % kGateColumns + (column % kTurn < kGateColumns ? 0 : p.n / 2);
}

struct Params : Product {
  Groups groups;
  Activation activation;
};
