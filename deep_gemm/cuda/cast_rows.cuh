// FP8 values and their scales, one for each row and 128 columns ("1x128"): activations, as the products take them.
//
//   rows of x [m, k]   -> registers -> largest magnitude of 128 columns -> scale      -> shared memory -> scales
//                         the same registers, divided by the scale      -> FP8 values
//
// A team of lanes takes 128 columns of a row, a block, at a time. A CTA takes kRows rows of kBlocks blocks, and all of its
// loads are under way before it looks at the first: only so does memory run at its full rate. Scales go through shared memory,
// because those of one block lie beside each other in memory for successive rows, which different teams cast.
#pragma once
#include "cast/values.cuh"

struct CastParams {
  const uint8_t* x;
  uint8_t* values;
  float* scales;
  uint64_t x_pitch, values_pitch;              // from a row to the next, in elements
  uint64_t scales_stride_m, scales_stride_k;  // the same for scales, and from a block to the next
  uint32_t m, k;
  float min_amax;       // the largest magnitude of a block counts as at least this
  uint32_t rounds_up;  // scales are powers of two
};
#include "cast_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

constexpr uint32_t kPasses = kRows * kBlocks / kTeams;
static_assert(kPasses * kTeams == kRows * kBlocks, "each team has as many blocks as the others");

struct SharedStorage {
  Divisor divisors[kBlocks][kRows];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "CastConfig.shared_bytes and SharedStorage differ");

// One block of one row.
struct Place {
  uint32_t row, block;  // counted from the first of the CTA

  DEVICE Place(uint32_t pass, uint32_t team)
      : row((pass * kTeams + team) / kBlocks), block((pass * kTeams + team) % kBlocks) {}
};

KERNEL(kNumThreads, kCtasPerSm) cast_rows(GRID_CONSTANT CastParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t tiles_k = ceil_div(ceil_div(p.k, kBlock), kBlocks);
  const uint32_t first_row = ptx::block_index() / tiles_k * kRows, first_block = ptx::block_index() % tiles_k * kBlocks;
  const uint32_t team = ptx::thread_index() / kLanes, lane = ptx::thread_index() % kLanes;

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait

  Piece pieces[kPasses];
#pragma unroll
  for (uint32_t pass = 0; pass < kPasses; ++pass) {
    const Place at(pass, team);
    const uint32_t row = first_row + at.row;
    pieces[pass] = load_piece(p.x + row * p.x_pitch * kInputBytes, row < p.m, (first_block + at.block) * kBlock, p.k, lane);
  }

  // A lane has the scale of one pass.
  uint32_t keys[kPasses];
#pragma unroll
  for (uint32_t pass = 0; pass < kPasses; ++pass) keys[pass] = key_of(pieces[pass]);
  const float amax = amax_of(largest_of_team(keys, lane));
  if (lane < kPasses) {
    const Place at(lane, team);
    store_divisor(&shared.divisors[at.block][at.row], divisor_of(amax, p.min_amax, p.rounds_up));
  }
  ptx::syncwarp();

#pragma unroll
  for (uint32_t pass = 0; pass < kPasses; ++pass) {
    const Place at(pass, team);
    const uint32_t row = first_row + at.row;
    const Divisor divisor = load_divisor(&shared.divisors[at.block][at.row]);
    float quotients[kElements];
#pragma unroll
    for (uint32_t i = 0; i < kElements; ++i) quotients[i] = quotient_of(element_of(pieces[pass], i), divisor);
    if (row < p.m)
      store_piece(p.values + row * p.values_pitch, (first_block + at.block) * kBlock, p.k, lane, quotients);
  }
  ptx::syncthreads();

  // Successive threads store to places beside each other, whichever way the scales lie.
  const bool is_m_major = p.scales_stride_m == 1;
  for (uint32_t i = ptx::thread_index(); i < kRows * kBlocks; i += kNumThreads) {
    const uint32_t row = is_m_major ? i % kRows : i / kBlocks, block = is_m_major ? i / kRows : i % kBlocks;
    if (first_row + row < p.m && (first_block + block) * kBlock < p.k)
      ptx::st_global_f32(p.scales + (first_row + row) * p.scales_stride_m + (first_block + block) * p.scales_stride_k,
                         load_divisor(&shared.divisors[block][row]).scale);
  }
}
