// Rows of groups whose product is activated. D holds the FP8 values.
#pragma once
#include "params.cuh"
#include "work/layout.cuh"

struct Activation {
  const float* row_weights;  // a factor for each row; null: none
  float* scales;             // [columns of activations / 64, scales_pitch], a column for each row
  uint32_t scales_pitch;
  float limit;  // gates count as at most this, ups as within +-this
};

struct Params : Product {
  Groups groups;
  Activation activation;
};
