// This rank's tokens, cast to FP8, straight into the memory of the ranks that have their experts.
//
//   x --cast_piece--> a row in shared memory | values | scales | weights of routes |
//                     --16 bytes a thread--> slot (this rank, token) of each rank that has any of the token's experts
//   topk_ids --> ids of the slot on every rank: the experts there, numbered from 0, or -1
//
// A slot whose ids are all -1 may hold anything. So ids are written to all slots in each call, those of tokens that this rank lacks
// too: a slot that is not sent to held another call's row.
#pragma once
#include "cast/piece.cuh"
#include "meeting.cuh"
#include "routes.cuh"

struct SendParams {
  const uint8_t* x;           // [tokens, hidden]
  const uint8_t* topk_ids;    // [tokens, topk], of kIdBytes
  const float* topk_weights;  // [tokens, topk]
  int32_t* row_of;            // [tokens, ranks]: (rank, token) as a row of the sums that come back; -1: does not go there
  uint64_t ids;               // byte of a room: int32 [ranks, max_tokens, topk]; rows [ranks, max_tokens] lie at 0
  uint32_t x_pitch;           // in bytes
  uint32_t tokens, max_tokens, hidden, topk;
  uint32_t experts_here;      // of each rank
  uint32_t row_bytes;
  Meeting meeting;
};
#include "send_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

struct SharedStorage {
  uint8_t row[kMaxRowBytes];
  MeetingStorage meeting;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "SendConfig.shared_bytes and SharedStorage differ");

constexpr uint32_t kNone = ~0u;

// The number of a route's expert; kNoExpert if no rank has it.
DEVICE uint32_t expert_of(const SendParams& p, uint32_t token, uint32_t j) {
  return load_expert(p.topk_ids, uint64_t{token} * p.topk + j, 0, p.experts_here * p.meeting.ranks);
}

DEVICE void store_piece(const SendParams& p, uint8_t* row, uint32_t block, uint32_t lane, const CastPiece& cast) {
  const uint32_t column = block * kBlock + column_of(lane, 0);
  if (column >= p.hidden) return;
  if constexpr (kVector == 8)
    ptx::st_shared_v2_b32(row + column, cast.values.words[0], cast.values.words[1]);
  else
    ptx::st_shared_b32(row + column, cast.values.words[0]);
  if (lane == 0) ptx::st_shared_f32(row + p.hidden + block * 4, cast.scale);
}

DEVICE void make_row(const SendParams& p, uint8_t* row, uint32_t token) {
  const uint32_t blocks = ceil_div(p.hidden, kBlock), lane = ptx::thread_index() % kLanes;
  const uint32_t weights = p.hidden + blocks * 4, words = (p.row_bytes - weights) / 4;  // the last ones are padding
  for (uint32_t j = ptx::thread_index(); j < words; j += kNumThreads)
    ptx::st_shared_f32(row + weights + j * 4, j < p.topk ? ptx::ld_global_f32(p.topk_weights + uint64_t{token} * p.topk + j) : 0.f);
#pragma unroll 1
  for (uint32_t first = 0; first < blocks; first += kTeams) {
    const uint32_t block = first + ptx::thread_index() / kLanes;  // past the last for some teams: a warp stays together
    const Piece piece = load_piece(p.x + uint64_t{token} * p.x_pitch, true, block * kBlock, p.hidden, lane);
    store_piece(p, row, block, lane, cast_piece(piece, lane));
  }
}

// What sums up the tokens of this rank still runs.
DEVICE void send_nothing(const SendParams& p) {
  for (uint32_t i = ptx::block_index() * kNumThreads + ptx::thread_index(); i < p.tokens * p.meeting.ranks;
       i += ptx::grid_size() * kNumThreads)
    ptx::st_global_b32(p.row_of + i, kNone);
}

KERNEL(kNumThreads, kCtasPerSm) send_rows(GRID_CONSTANT SendParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const Meeting& m = p.meeting;
  const uint32_t thread = ptx::thread_index();
  ptx::griddepcontrol_wait();
  if (!is_whole(m)) return send_nothing(p);
#pragma unroll 1
  for (uint32_t token = ptx::block_index(); token < p.max_tokens; token += ptx::grid_size()) {
    const bool is_there = token < p.tokens;
    uint32_t goes_to = 0;  // bit r: to rank r
    if (is_there) {
      make_row(p, shared.row, token);
      for (uint32_t j = 0; j < p.topk; ++j) {
        const uint32_t expert = expert_of(p, token, j);
        if (expert != kNoExpert) goes_to |= 1u << expert / p.experts_here;
      }
      if (thread < m.ranks)
        ptx::st_global_b32(p.row_of + uint64_t{token} * m.ranks + thread,
                           goes_to >> thread & 1 ? thread * p.max_tokens + token : kNone);
    }
    ptx::syncthreads();  // the row is whole
#pragma unroll 1
    for (uint32_t r = 0; r < m.ranks; ++r) {
      const uint64_t slot = uint64_t{m.rank} * p.max_tokens + token;
      for (uint32_t j = thread; j < p.topk; j += kNumThreads) {
        const uint32_t expert = is_there ? expert_of(p, token, j) : kNoExpert;
        const bool is_here = expert != kNoExpert && expert / p.experts_here == r;
        ptx::st_global_b32(m.rooms[r] + p.ids + (slot * p.topk + j) * 4, is_here ? expert - r * p.experts_here : kNone);
      }
      if ((goes_to >> r & 1) == 0) continue;
      uint8_t* to = m.rooms[r] + slot * p.row_bytes;
      for (uint32_t at = thread * 16; at < p.row_bytes; at += kNumThreads * 16) {
        const ptx::Uint4 piece = ptx::ld_shared_v4_b32(shared.row + at);
        ptx::st_global_v4_b32(to + at, piece.x, piece.y, piece.z, piece.w);
      }
    }
    ptx::syncthreads();  // all have read the row
  }
  meet(m, shared.meeting);
}
