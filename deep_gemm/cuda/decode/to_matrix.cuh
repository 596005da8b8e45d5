// D of one product is a matrix as it is computed.
#pragma once
#include "decode/product.cuh"

struct Params : DecodeProduct {};

// Where a column of the product lies in D.
DEVICE uint32_t column_of_d(const Params&, uint32_t column) { return column; }
