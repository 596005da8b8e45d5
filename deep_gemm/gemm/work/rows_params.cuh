// Rows of groups, and no more than that.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"

struct Params : Product {
  Groups groups;
};

// The row of B that is a column of D.
DEVICE uint32_t row_of_b(const Product&, uint32_t column) { return column; }
