// Rows of groups that go to addresses, perhaps beside the product that stores these rows.
#pragma once
#include "params.cuh"
#include "work/beside.cuh"
#include "work/layout.cuh"

struct Params : Product {
  Groups groups;
  Beside beside;
};

// The row of B that is a column of D.
DEVICE uint32_t row_of_b(const Params&, uint32_t column) { return column; }
