// Casts rows to FP8 values, with a scale for each row and 128, 64 or 32 columns, as products need activations; to
// FP4 values, with a scale for each row and 32 or 128 columns; or to BF16 values, without scales (kHasScales is false).
//
//   rows of x -> registers -> (silu(gate) * up) -> largest magnitude of a block    -> scale      -> scales
//                                                  the same registers, divided by the scale  -> FP8 or FP4 values
//
// A team of lanes casts kBlock columns of a unit of kRows rows. It issues all loads before it uses the first, because
// the memory's full rate needs many loads in flight. The included files define the rows, the numbers and the outputs.
#pragma once
#include "cast/values.cuh"

struct CastParams {
  const uint8_t* x;
  uint8_t* values;
  uint8_t* scales;
  const int32_t* sizes;      // each group's number of rows, or its end
  const float* row_weights;  // factors of rows; null: none
  const int32_t* row_of;     // [m, topk]: the rows of `values` to which a row of x is cast; -1: none
  // Pitches in bytes: from row to row of x and of values; of scales from row to row and from block to block, and the
  // extra gap between groups. They have 32 bits, so that an address needs one instruction.
  uint32_t x_pitch, values_pitch, scales_stride_m, scales_stride_k, scales_stride_g;
  uint32_t m, k;  // rows of x, and columns that are cast
  uint32_t block_reciprocal;  // of ceil(k / kBlock): see BlockOfRows
  uint32_t num_groups, alignment, topk;
  float min_amax;       // the largest magnitude of a block is raised to at least this
  float limit;          // the upper limit of gate, and of the magnitude of up
  uint32_t gating;      // 0: silu(gate) * up without limit and row_weights; 1: SwiGLU; 2: SiTU
  uint32_t rounds_up;   // scales are powers of two
  float alpha, beta, alpha_reciprocal, beta_reciprocal;  // of the activation
};
#include "cast_params_layout.cuh"  // asserts that core/params.py has the same layout

// Up to kRows rows of a group: from `row` to `end`.
struct Unit {
  uint32_t row, end, group;
};
#include ROWS     // Rows: lists the units
#include SOURCE   // Loaded, load, Held, held_of: the numbers to cast
#include FORMAT   // kLargestValue, Values, pack_values, store_values: the type of values
#include SCALES   // store_scale: the layout of scales
#include TARGETS  // Targets: the rows to which values and scales are stored
#include TEAM     // Team: casts the columns of a team of lanes, a block or a whole row

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
