// D holds the columns of a product in heads. A head has a left and a right part, and unwritten columns between the two:
//
//   columns of the product   | left 0 | right 0 | left 1 | right 1 | ...
//   columns of D             | left 0 | mid | right 0 | left 1 | mid | right 1 | ...
//
// gemm/problem.py describes heads in the same way, and derives multiplier and shift.
#pragma once
#include "ptx/platform.cuh"

struct HeadParts {
  uint32_t left, mid, columns;  // columns of a left part, between the parts, and of both parts
  uint32_t multiplier, shift;   // divide a multiple of 8 by `columns` with one multiplication

  // Counts the whole heads before a column of the product.
  DEVICE uint32_t before(uint32_t column) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(column / 8) * multiplier >> shift);
  }
};
