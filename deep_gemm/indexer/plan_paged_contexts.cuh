// The schedule of fp8_paged_mqa_logits: all sequences' segments in one line, divided into equal, contiguous shares.
//
//   segments of a sequence = segments of the longest context of its tokens
//   row s                  = sequence of the line's segment number total * s / shares, and its number in the sequence
//   last row               = the position after the last segment
//
// One CTA. Each thread adds up several consecutive sequences; the search for a row finds the thread, then the sequence.
// So a row never names a sequence without segments, unless no sequence has segments: then all rows are zeros.
#pragma once
#include "config.cuh"
#include "lanes.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct PlanParams {
  const int32_t* contexts;  // [sequences, next_n]
  int32_t* schedule;        // [shares + 1, 2]
  uint32_t sequences, next_n, shares;
};
#include "plan_params_layout.cuh"  // asserts that the layout of PlanParams is what core/params.py packs

constexpr uint32_t kWarps = kNumThreads / 32;

struct SharedStorage {
  uint32_t ends[kNumThreads];  // segments of the sequences of this thread and of all earlier threads
  uint32_t of_warps[kWarps];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "PlanConfig.shared_bytes and SharedStorage differ");

DEVICE uint32_t segments_of(const PlanParams& p, uint32_t sequence) {
  int32_t most = 0;
  for (uint32_t token = 0; token < p.next_n; ++token) {
    const int32_t context = ptx::ld_global_i32(p.contexts + static_cast<uint64_t>(sequence) * p.next_n + token);
    most = context > most ? context : most;
  }
  return ceil_div(static_cast<uint32_t>(most), kSegmentKeys);
}

KERNEL(kNumThreads, 1) plan_paged_contexts(GRID_CONSTANT PlanParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t thread = ptx::thread_index(), warp = thread / 32, lane = ptx::lane_index();
  const uint32_t per_thread = ceil_div(p.sequences, kNumThreads);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start, and runs up to its own wait
  uint32_t sum = 0;
  for (uint32_t i = 0; i < per_thread; ++i) {
    const uint32_t sequence = thread * per_thread + i;
    if (sequence < p.sequences) sum += segments_of(p, sequence);
  }
  sum = sum_up_to_lane(sum, lane);
  if (lane == 31) ptx::st_shared_b32(&shared.of_warps[warp], sum);
  ptx::syncthreads();
  uint32_t total = 0;
#pragma unroll
  for (uint32_t other = 0; other < kWarps; ++other) {
    if (other == warp) sum += total;
    total += ptx::ld_shared_b32(&shared.of_warps[other]);
  }
  ptx::st_shared_b32(&shared.ends[thread], sum);
  ptx::syncthreads();

  for (uint32_t row = thread; row <= p.shares; row += kNumThreads) {
    uint32_t sequence = 0, segment = 0;
    if (total) {
      const bool is_last = row == p.shares;
      const uint32_t wanted = is_last ? total - 1 : static_cast<uint32_t>(static_cast<uint64_t>(total) * row / p.shares);
      uint32_t owner = 0;  // the first thread whose sum exceeds `wanted`
#pragma unroll 1
      for (uint32_t step = kNumThreads / 2; step; step /= 2)
        if (ptx::ld_shared_b32(&shared.ends[owner + step - 1]) <= wanted) owner += step;
      segment = wanted - (owner ? ptx::ld_shared_b32(&shared.ends[owner - 1]) : 0);
      sequence = owner * per_thread;
#pragma unroll 1
      for (uint32_t i = 1; i < per_thread; ++i) {
        const uint32_t segments = segments_of(p, sequence);
        if (segment < segments) break;
        segment -= segments;
        ++sequence;
      }
      segment += is_last;
    }
    ptx::st_global_v2_b32(p.schedule + static_cast<uint64_t>(row) * 2, sequence, segment);
  }
}
