// Writes this rank's tokens, in FP8 or as BF16, where the ranks of their experts fetch them, and tells each rank which of its experts need them.
//
//   x --put_token--> row of this rank's room | values | scales, of FP8 alone | weights of routes |
//   topk_ids --> ids of the token on every rank: the experts there, numbered from 0, or -1
//
// Each call writes ids for all max_tokens tokens: otherwise ids of an earlier call would follow this rank's last token.
#pragma once
#include "config.cuh"
#include "meeting.cuh"
#include "routes.cuh"

struct PostParams {
  const uint8_t* x;           // [tokens, hidden]
  const uint8_t* sf;          // FP32 [tokens, blocks], if x is FP8 already
  const uint8_t* topk_ids;    // [tokens, topk], of kIdBytes
  const float* topk_weights;  // [tokens, topk]
  int32_t* row_of;            // [tokens, topk]: the row of the route's result, which comes back; -1: no expert
  uint64_t ids;               // offset in a room of int32 [ranks, max_tokens, topk]; rows [max_tokens] are at offset 0
  uint32_t x_pitch, sf_pitch; // in bytes
  uint32_t tokens, max_tokens, hidden, topk;  // hidden: bytes of a row's values (FP8: its columns)
  uint32_t experts_here;      // experts of each rank
  uint32_t row_bytes;
  Meeting meeting;
};
#include "post_params_layout.cuh"  // asserts the layout that core/params.py packs
#include TOKEN                     // put_token

struct SharedStorage {
  MeetingStorage meeting;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "PostConfig.shared_bytes and SharedStorage differ");

constexpr uint32_t kNone = ~0u;

// The number of a route's expert; kNoExpert if no rank has it.
DEVICE uint32_t expert_of(const PostParams& p, uint32_t token, uint32_t j) {
  return load_expert(p.topk_ids, uint64_t{token} * p.topk + j, 0, p.experts_here * p.meeting.ranks);
}

// Called by a warp: writes a token's experts to the rank that has them, and on this rank the rows of the results of the
// token's routes (row_of), and the routes' weights (in the token's row).
DEVICE void put_routes(const PostParams& p, uint8_t* row, uint32_t token, uint32_t blocks) {
  const Meeting& m = p.meeting;
  const bool is_there = token < p.tokens;
  const uint64_t slot = uint64_t{m.rank} * p.max_tokens + token;
  for (uint32_t j = ptx::lane_index(); j < p.topk; j += 32) {
    const uint32_t expert = is_there ? expert_of(p, token, j) : kNoExpert;
    const float weight = is_there ? ptx::ld_global_f32(p.topk_weights + uint64_t{token} * p.topk + j) : 0;
    for (uint32_t r = 0; r < m.ranks; ++r) {
      const bool is_here = expert != kNoExpert && expert / p.experts_here == r;
      ptx::st_global_b32(m.rooms[r] + p.ids + (slot * p.topk + j) * 4, is_here ? expert - r * p.experts_here : kNone);
    }
    if (!is_there) continue;
    ptx::st_global_b32(p.row_of + token * p.topk + j, expert == kNoExpert ? kNone : token * p.topk + j);
    ptx::st_global_f32(row + p.hidden + (blocks + j) * 4, weight);
  }
}

// If a rank did not come in time: marks all routes as without a result, for the kernel that adds up results.
DEVICE void post_nothing(const PostParams& p) {
  for (uint32_t i = ptx::block_index() * kNumThreads + ptx::thread_index(); i < p.tokens * p.topk;
       i += ptx::grid_size() * kNumThreads)
    ptx::st_global_b32(p.row_of + i, kNone);
}

KERNEL(kNumThreads, kCtasPerSm) post_rows(GRID_CONSTANT PostParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const Meeting& m = p.meeting;
  ptx::griddepcontrol_wait();
  if (!is_whole(m)) return post_nothing(p);
  const uint32_t blocks = kHasScales ? ceil_div(p.hidden, kBlock) : 0;
  uint32_t turn = 0;  // the warp that writes routes: warps take turns, because loading routes delays a warp
#pragma unroll 1
  for (uint32_t token = ptx::block_index(); token < p.max_tokens; token += ptx::grid_size()) {
    uint8_t* row = m.rooms[m.rank] + uint64_t{token} * p.row_bytes;
    if (ptx::thread_index() / 32 == turn) put_routes(p, row, token, blocks);
    turn = turn + 1 == kNumThreads / 32 ? 0 : turn + 1;
    if (token < p.tokens) put_token(p, row, token, blocks);
  }
  meet(m, shared.meeting);
}
