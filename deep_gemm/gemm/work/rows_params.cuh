// The parameters for groups of rows whose product is not activated.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"

struct Params : Product {
  Groups groups;
};

// Returns the row of B for a column of D.
DEVICE uint32_t row_of_b(const Product&, uint32_t column) { return column; }
