// Rows of groups whose product, of gate and up, is activated. D holds the FP8 values, or BF16 where there are no scales.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"

DEVICE uint32_t row_of_b(const Product& p, uint32_t column) { return row_of_gates(p, column); }

struct Params : Product {
  Groups groups;
  Activation activation;
};
