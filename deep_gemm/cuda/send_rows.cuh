// This rank's tokens in FP8, straight into the memory of the ranks that have their experts.
//
//   x --put_token--> a row in shared memory | values | scales | weights of routes |
//                     --a bulk copy--> slot (this rank, token) of each rank that has any of the token's experts
//   topk_ids --> ids of the slot on every rank: the experts there, numbered from 0, or -1
//
// A slot whose ids are all -1 may hold anything. So ids are written to all slots in each call, those of tokens that this rank lacks
// too: a slot that is not sent to held another call's row.
#pragma once
#include "config.cuh"
#include "meeting.cuh"
#include "ptx/tma.cuh"
#include "routes.cuh"

struct SendParams {
  const uint8_t* x;           // [tokens, hidden]
  const uint8_t* sf;          // FP32 [tokens, blocks], if x is FP8 already
  const uint8_t* topk_ids;    // [tokens, topk], of kIdBytes
  const float* topk_weights;  // [tokens, topk]
  int32_t* row_of;            // [tokens, topk]: the route as a row of the results that come back; -1: it has no expert
  uint64_t ids;               // byte of a room: int32 [ranks, max_tokens, topk]; rows [ranks, max_tokens] lie at 0
  uint32_t x_pitch, sf_pitch; // in bytes
  uint32_t tokens, max_tokens, hidden, topk;
  uint32_t experts_here;      // of each rank
  uint32_t row_bytes;
  Meeting meeting;
};
#include "send_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it
#include TOKEN                     // put_token

struct SharedStorage {
  alignas(16) uint8_t rows[kNumRows][kMaxRowBytes];  // one is made while others are copied
  MeetingStorage meeting;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "SendConfig.shared_bytes and SharedStorage differ");

constexpr uint32_t kNone = ~0u;

// The number of a route's expert; kNoExpert if no rank has it.
DEVICE uint32_t expert_of(const SendParams& p, uint32_t token, uint32_t j) {
  return load_expert(p.topk_ids, uint64_t{token} * p.topk + j, 0, p.experts_here * p.meeting.ranks);
}

DEVICE void make_row(const SendParams& p, uint8_t* row, uint32_t token) {
  const uint32_t blocks = ceil_div(p.hidden, kBlock);
  const uint32_t weights = p.hidden + blocks * 4, words = (p.row_bytes - weights) / 4;  // the last ones are padding
  for (uint32_t j = ptx::thread_index(); j < words; j += kNumThreads)
    ptx::st_shared_f32(row + weights + j * 4, j < p.topk ? ptx::ld_global_f32(p.topk_weights + uint64_t{token} * p.topk + j) : 0.f);
  put_token(p, row, token, blocks);
}

// What sums up the tokens of this rank still runs.
DEVICE void send_nothing(const SendParams& p) {
  for (uint32_t i = ptx::block_index() * kNumThreads + ptx::thread_index(); i < p.tokens * p.topk;
       i += ptx::grid_size() * kNumThreads)
    ptx::st_global_b32(p.row_of + i, kNone);
}

KERNEL(kNumThreads, kCtasPerSm) send_rows(GRID_CONSTANT SendParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const Meeting& m = p.meeting;
  const uint32_t thread = ptx::thread_index();
  ptx::griddepcontrol_wait();
  if (!is_whole(m)) return send_nothing(p);
  uint32_t next_row = 0;
#pragma unroll 1
  for (uint32_t token = ptx::block_index(); token < p.max_tokens; token += ptx::grid_size()) {
    uint8_t* row = shared.rows[next_row];
    next_row = next_row + 1 == kNumRows ? 0 : next_row + 1;
    if (thread == 0) ptx::tma_store_wait_read<kNumRows - 1>();
    ptx::syncthreads();  // the row may be written again
    const bool is_there = token < p.tokens;
    uint32_t goes_to = 0;  // bit r: to rank r
    if (is_there) {
      make_row(p, row, token);
      for (uint32_t j = 0; j < p.topk; ++j) {
        const uint32_t expert = expert_of(p, token, j);
        if (expert != kNoExpert) goes_to |= 1u << expert / p.experts_here;
      }
      for (uint32_t j = thread; j < p.topk; j += kNumThreads) {
        const uint32_t route = token * p.topk + j;
        ptx::st_global_b32(p.row_of + route, expert_of(p, token, j) == kNoExpert ? kNone : route);
      }
    }
    ptx::fence_proxy_async_shared();  // every writing thread, before the row is copied
    ptx::syncthreads();               // the row is whole
    const uint64_t slot = uint64_t{m.rank} * p.max_tokens + token;
#pragma unroll 1
    for (uint32_t r = 0; r < m.ranks; ++r) {
      if (thread == 0 && (goes_to >> r & 1)) ptx::bulk_store(m.rooms[r] + slot * p.row_bytes, row, p.row_bytes);
      for (uint32_t j = thread; j < p.topk; j += kNumThreads) {
        const uint32_t expert = is_there ? expert_of(p, token, j) : kNoExpert;
        const bool is_here = expert != kNoExpert && expert / p.experts_here == r;
        ptx::st_global_b32(m.rooms[r] + p.ids + (slot * p.topk + j) * 4, is_here ? expert - r * p.experts_here : kNone);
      }
    }
    if (thread == 0) ptx::tma_store_commit();
  }
  if (thread == 0) ptx::tma_store_wait<0>();  // all rows have been written, before this thread counts
  meet(m, shared.meeting);
}
