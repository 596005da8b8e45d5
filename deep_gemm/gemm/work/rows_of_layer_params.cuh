// Rows of groups of a layer's products: of the first, gate and up, which is activated, so that D holds FP8 values, or BF16 where
// there are no scales; or of the second, whose rows go to addresses.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"
#include "work/tile_queue.cuh"

// The row of B for a column of the product. In the product kGateColumns of gate and kGateColumns of up take turns. B's
// rows take the same turns if kGateColumns is 8; if it is more, all rows of gate come first.
DEVICE uint32_t row_of_b(const Product& p, uint32_t column) {
  if constexpr (kGateColumns == 8) return column;
  constexpr uint32_t kTurn = 2 * kGateColumns;
  return column / kTurn * kGateColumns + column % kGateColumns + (column % kTurn < kGateColumns ? 0 : p.n / 2);
}

struct Params : Product {
  Groups groups;
  Activation activation;
  Beside beside;
};
