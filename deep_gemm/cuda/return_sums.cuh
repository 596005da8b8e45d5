// What the experts of this rank gave of each row that arrived, summed up by weight, straight into the memory of the token's rank:
//
//   sums[this rank, token] on the token's rank = sum over j of weights[row, j] * y[row_of[row, j]], in order of j
//
// A row without a route here sends nothing: its rank knows as much (row_of of send_rows). The kernel that then adds up what
// ranks sent is gather_weighted. A meeting after this kernel says too that all rows that arrived have been read.
#pragma once
#include "config.cuh"
#include "meeting.cuh"
#include "weighted_rows.cuh"

struct ReturnParams {
  const uint8_t* y;        // BF16 [rows, n]
  const int32_t* row_of;   // [ranks, max_tokens, topk], -1: the route has no row here
  uint64_t y_pitch;        // in elements
  uint64_t weights;        // byte of a room: FP32 [topk] of its first row
  uint64_t sums;           // byte of a room: BF16 [ranks, max_tokens, n]
  uint32_t row_bytes;      // from a row of a room to the next
  uint32_t max_tokens, topk, n;
  Meeting meeting;
};
#include "return_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

struct SharedStorage {
  MeetingStorage meeting;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "ReturnConfig.shared_bytes and SharedStorage differ");

KERNEL(kNumThreads, kCtasPerSm) return_sums(GRID_CONSTANT ReturnParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const Meeting& m = p.meeting;
  ptx::griddepcontrol_wait();
  if (!is_whole(m)) return;
#pragma unroll 1
  for (uint32_t row = ptx::block_index(); row < m.ranks * p.max_tokens; row += ptx::grid_size()) {
    const uint32_t to = row / p.max_tokens, token = row % p.max_tokens;
    const uint64_t first_route = uint64_t{row} * p.topk;
    const uint8_t* weights = m.rooms[m.rank] + uint64_t{row} * p.row_bytes + p.weights;
    uint8_t* sums = m.rooms[to] + p.sums + (uint64_t{m.rank} * p.max_tokens + token) * p.n * 2;
#pragma unroll 1
    for (uint32_t piece = ptx::thread_index(); piece < p.n / kColumns; piece += kNumThreads) {
      float total[kColumns] = {};
      const bool has_routes =
          add_rows(total, p.y, p.y_pitch, piece * kColumns, p.row_of, first_route, p.topk,
                   [&](uint64_t route) { return ptx::ld_global_f32(weights + (route - first_route) * 4); });
      if (!has_routes) break;
      store_sums(sums + piece * kColumns * 2, total);
    }
  }
  meet(m, shared.meeting);
}
