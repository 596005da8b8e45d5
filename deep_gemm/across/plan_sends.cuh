// Finds the ranks that receive each token (once for each rank), and its row for each rank. Rows are stacked by rank, and within
// a rank by token, so the order is always the same.
//
//   row of a token for a rank = the rank's first row + tokens for that rank in earlier CTAs + earlier tokens in this CTA
//
// CTA i gives rows to kNumThreads tokens. Like a CTA of route_rows, it counts all tokens itself, so no CTA waits for another.
// The first CTA also writes one message for all ranks: facts | rows for each rank | routes for each rank.
#pragma once
#include "ptx/warp.cuh"
#include "routes.cuh"

struct PlanSendsParams {
  int64_t facts[kNumFacts];
  const uint8_t* topk_ids;  // [tokens, topk], of kIdBytes each
  int32_t* row_of;          // [tokens, topk]: the rows of a token, in order of ranks; then -1
  int64_t* told;            // [kNumFacts + 2 ranks]
  uint32_t tokens, topk;
  uint32_t experts_here;  // experts of each rank
  uint32_t ranks;
};
#include "plan_sends_params_layout.cuh"  // asserts the layout that core/params.py packs

constexpr uint32_t kWarps = kNumThreads / 32;
constexpr uint32_t kAtOnce = 8;  // loads that a thread starts before it waits
static_assert(kMaxRanks <= 64, "a bit for each");

struct SharedStorage {
  uint32_t total[kMaxRanks], before[kMaxRanks];  // tokens for each rank: in all CTAs, and in the CTAs before this one
  uint32_t routes[kMaxRanks];                    // routes to each rank
  uint32_t next[kWarps][kMaxRanks];              // tokens for each rank in a warp; later the row of the first such token
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "PlanSendsConfig.shared_bytes and SharedStorage differ");

// Returns the ranks that receive a token: bit r for rank r. Counts the routes to each rank unless `routes` is null.
DEVICE uint64_t ranks_of(const PlanSendsParams& p, uint32_t token, uint32_t* routes) {
  uint64_t ranks = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < p.topk && token < p.tokens; first += kAtOnce) {
    uint32_t experts[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint64_t route = uint64_t{token} * p.topk + first + i;
      experts[i] = first + i < p.topk ? load_expert(p.topk_ids, route, 0, p.experts_here * p.ranks) : kNoExpert;
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (experts[i] == kNoExpert) continue;
      const uint32_t rank = experts[i] / p.experts_here;
      ranks |= uint64_t{1} << rank;
      if (routes != nullptr) ptx::red_shared_add(routes + rank, 1);
    }
  }
  return ranks;
}

// Returns a mask of the warp's lanes that have a token for this rank.
DEVICE uint32_t lanes_for(uint64_t ranks, uint32_t rank) { return ptx::ballot_sync((ranks >> rank & 1) != 0); }

DEVICE void count_all(const PlanSendsParams& p, SharedStorage& shared, uint32_t first_of_cta) {
  uint32_t* routes = ptx::block_index() == 0 ? shared.routes : nullptr;
#pragma unroll 1
  for (uint32_t first = ptx::warp_index() * 32; first < p.tokens; first += kNumThreads) {
    const uint64_t ranks = ranks_of(p, first + ptx::lane_index(), routes);
#pragma unroll 1
    for (uint32_t rank = 0; rank < p.ranks; ++rank) {
      const uint32_t count = ptx::popc(lanes_for(ranks, rank));
      if (count == 0 || ptx::lane_index() != 0) continue;
      ptx::red_shared_add(&shared.total[rank], count);
      if (first < first_of_cta) ptx::red_shared_add(&shared.before[rank], count);
    }
  }
}

DEVICE void tell(const PlanSendsParams& p, uint32_t at, uint64_t number) {
  ptx::st_global_v2_b32(p.told + at, static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32));
}

KERNEL(kNumThreads, 1) plan_sends(GRID_CONSTANT PlanSendsParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t thread = ptx::thread_index(), warp = ptx::warp_index(), lane = ptx::lane_index();
  const uint32_t first_of_cta = ptx::block_index() * kNumThreads, token = first_of_cta + thread;
  if (thread < p.ranks) {
    ptx::st_shared_b32(&shared.total[thread], 0);
    ptx::st_shared_b32(&shared.before[thread], 0);
    ptx::st_shared_b32(&shared.routes[thread], 0);
  }
  ptx::syncthreads();

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  count_all(p, shared, first_of_cta);
  const uint64_t ranks = ranks_of(p, token, nullptr);
#pragma unroll 1
  for (uint32_t rank = 0; rank < p.ranks; ++rank) {
    const uint32_t count = ptx::popc(lanes_for(ranks, rank));
    if (lane == 0) ptx::st_shared_b32(&shared.next[warp][rank], count);
  }
  ptx::syncthreads();

  if (thread < p.ranks) {
    uint32_t row = ptx::ld_shared_b32(&shared.before[thread]);
    for (uint32_t rank = 0; rank < thread; ++rank) row += ptx::ld_shared_b32(&shared.total[rank]);
    for (uint32_t w = 0; w < kWarps; ++w) {
      const uint32_t count = ptx::ld_shared_b32(&shared.next[w][thread]);
      ptx::st_shared_b32(&shared.next[w][thread], row);
      row += count;
    }
    if (ptx::block_index() == 0) {
      tell(p, kNumFacts + thread, ptx::ld_shared_b32(&shared.total[thread]));
      tell(p, kNumFacts + p.ranks + thread, ptx::ld_shared_b32(&shared.routes[thread]));
    }
  }
  if (ptx::block_index() == 0 && thread < kNumFacts) tell(p, thread, p.facts[thread]);
  ptx::syncthreads();

  uint32_t column = 0;  // column of the token's next row in p.row_of
  int32_t* rows = p.row_of + uint64_t{token} * p.topk;
#pragma unroll 1
  for (uint32_t rank = 0; rank < p.ranks; ++rank) {
    const uint32_t lanes = lanes_for(ranks, rank);
    if ((lanes >> lane & 1) == 0) continue;
    ptx::st_global_b32(rows + column, ptx::ld_shared_b32(&shared.next[warp][rank]) + ptx::popc(lanes & ((1u << lane) - 1)));
    ++column;
  }
  if (token >= p.tokens) return;
  for (; column < p.topk; ++column) ptx::st_global_b32(rows + column, ~0u);
}
