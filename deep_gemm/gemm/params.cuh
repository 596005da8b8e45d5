// The parameters of fp8_gemm that every kind of work has; core/params.py packs them. The file of a kind of work adds
// its own parameters, and calls the whole struct `Params`.
#pragma once
#include "ptx/tma.cuh"

struct Product {
  ptx::TensorMap map_a, map_b;  // not used for FP8 groups along k, which have maps of their own
  union {
    ptx::TensorMap map_sfa;
    uint64_t whole_sfa[16];  // A's scales for all of k: address, stride of rows, stride of groups
  };
  ptx::TensorMap map_d;
  union {
    ptx::TensorMap map_sfb;      // B has a scale for each row
    ptx::TensorMap map_whole_d;  // else, if rows are grouped: D without a way to cut off boxes, which TMA stores faster
    ptx::TensorMap map_right_d;  // else, if D has heads: their right parts; map_d has their left parts
  };
  const float* sfb;  // B has a scale for each 128x128 block, or for all of k
  const uint8_t* c;
  uint8_t* d;                 // for stores without a map: sums of a split k, padding of groups; or the rows' addresses
  uint64_t c_pitch, d_pitch;  // in elements
  uint32_t sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
  uint32_t words;  // the sides whose scales are words of UE8M0: see types.cuh
};

// The row of B for a column of a product that is activated: kGateColumns of gate and kGateColumns of up alternate there. B's
// rows alternate in the same way if kGateColumns is 8; if it is larger, all rows of gate come first.
DEVICE uint32_t row_of_gates(const Product& p, uint32_t column) {
  if constexpr (kGateColumns == 8) return column;
  constexpr uint32_t kTurn = 2 * kGateColumns;
  return column / kTurn * kGateColumns + column % kGateColumns + (column % kTurn < kGateColumns ? 0 : p.n / 2);
}

struct Activation {
  const float* row_weights;  // a factor for each row; null: none
  float* scales;             // [columns of activations / 64, scales_pitch], a column for each row
  uint32_t scales_pitch;
  float limit;  // gates are clamped to at most this, ups to +-this
};
