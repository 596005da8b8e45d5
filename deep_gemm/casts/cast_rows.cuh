// FP8 values and their scales, one for each row and 128 columns ("1x128"), 64 or 32: activations, as the products take them.
// Or FP4 values, with a scale for each row and 32 or 128 columns. Or BF16 ones, which have none (kHasScales).
//
//   rows of x -> registers -> (silu(gate) * up) -> largest magnitude of a block    -> scale      -> scales
//                                                  the same registers, divided by the scale  -> FP8 or FP4 values
//
// A team of lanes takes kBlock columns of a unit of kRows rows. It starts all loads before it uses the first, as memory
// needs for its full rate. Files of their own say which rows are cast, how numbers are made, and where they go.
#pragma once
#include "cast/values.cuh"

struct CastParams {
  const uint8_t* x;
  uint8_t* values;
  uint8_t* scales;
  const int32_t* sizes;      // of groups: the rows of each, or where each ends
  const float* row_weights;  // factors of rows; null: none
  const int32_t* row_of;     // [m, topk]: the rows of `values` that a row of x goes to; -1: none
  // Pitches in bytes: row to row of x and of values; scales by row, by block; the extra gap between groups. 32 bits, so
  // that an address is one instruction.
  uint32_t x_pitch, values_pitch, scales_stride_m, scales_stride_k, scales_stride_g;
  uint32_t m, k;  // rows of x, and columns that are cast
  uint32_t block_reciprocal;  // of ceil(k / kBlock): see BlockOfRows
  uint32_t num_groups, alignment, topk;
  float min_amax;       // the largest magnitude of a block counts as at least this
  float limit;          // gate counts as at most this, up as within +-this
  uint32_t gating;      // 0: silu(gate) * up without limit and row_weights; 1: SwiGLU; 2: SiTU
  uint32_t rounds_up;   // scales are powers of two
  float alpha, beta, alpha_reciprocal, beta_reciprocal;  // of the activation
};
#include "cast_params_layout.cuh"  // asserts that it lies as core/params.py packs it

// Some rows of a group, kRows at most.
struct Unit {
  uint32_t row, end, group;
};
#include ROWS     // Rows: which units there are
#include SOURCE   // Loaded, load, Held, held_of: the numbers to cast
#include FORMAT   // kLargestValue, Values, pack_values, store_values: the type of values
#include SCALES   // store_scale: how scales lie
#include TARGETS  // Targets: the rows that values and scales go to
#include TEAM     // Team: the columns that a team of lanes takes at a time, a block or a row

KERNEL(kNumThreads, kCtasPerSm) cast_rows(GRID_CONSTANT CastParams p) {
  const uint32_t blocks = kWholeRows ? 1 : ceil_div(p.k, kBlock);
  const uint32_t team = ptx::thread_index() / kLanes, lane = ptx::thread_index() % kLanes;
  ptx::griddepcontrol_wait();
  const Rows rows(p);
  Team of_lanes(p);
  uint32_t first = ptx::block_index() * kTeams;
  do {
    const BlockOfRows at(first + team, blocks, p.block_reciprocal);
    of_lanes.cast(p, rows.unit(at.row), at.block, lane);
    first += ptx::grid_size() * kTeams;
  } while (Rows::kIsShared && first < rows.num_units * blocks);
}
