// Rows of experts: each route, one expert of one token, gets a row, the rows being stacked by expert without gaps, and by route
// within an expert. So it is the same each time.
//
//   row of a route = where its expert's rows start + routes of that expert before this CTA's + before it in this CTA
//
// CTA i gives rows to kNumThreads routes. It counts all routes by itself, those before its own apart: they lie in the L2, and
// nobody waits for another CTA.
#pragma once
#include "ptx/warp.cuh"
#include "routes.cuh"

struct RouteParams {
  const uint8_t* topk_ids;  // [tokens, topk], of kIdBytes; ids of a token lie beside each other
  int32_t *counts, *ends;   // [experts]
  int32_t* row_of;          // [tokens, topk], -1: no expert
  int32_t *token_of, *ids;  // [tokens * topk], -1 behind the last row
  uint32_t num_routes, topk;
  uint32_t gap;                 // ids between those of a token and of the next
  uint32_t first, num_experts;  // the id that counts as expert 0; as many experts from there on
};
#include "route_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

constexpr uint32_t kWarps = kNumThreads / 32;
constexpr uint32_t kAtOnce = 8;  // loads under way at a time

struct SharedStorage {
  uint32_t total[kMaxExperts], before[kMaxExperts];  // routes of each expert: of all, of the CTAs before
  uint32_t start[kMaxExperts];                       // its first row
  uint32_t next[kWarps][kMaxExperts];  // routes of each expert that a warp has; then the row of the first of them
  uint32_t used;                       // rows that have a token
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "RouteConfig.shared_bytes and SharedStorage differ");

// Where a route's id is. Routes kNumThreads apart follow each other by additions: divisions would take longer than loads.
struct Place {
  uint64_t at;        // among the ids
  uint32_t of_token;  // which of its token's routes

  DEVICE Place(const RouteParams& p, uint32_t route)
      : at(route + uint64_t{route / p.topk} * p.gap), of_token(route % p.topk) {}

  // `step` is the place of route kNumThreads.
  DEVICE void advance(const RouteParams& p, const Place& step) {
    at += step.at, of_token += step.of_token;
    if (of_token >= p.topk) of_token -= p.topk, at += p.gap;
  }

  DEVICE uint32_t expert(const RouteParams& p) const { return load_expert(p.topk_ids, at, p.first, p.num_experts); }
};

DEVICE void count_all(const RouteParams& p, SharedStorage& shared, uint32_t first_of_cta) {
  const Place step(p, kNumThreads);
  Place place(p, ptx::thread_index());
#pragma unroll 1
  for (uint32_t first = 0; first < p.num_routes; first += kNumThreads * kAtOnce) {
    uint32_t experts[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t route = first + i * kNumThreads + ptx::thread_index();
      experts[i] = route < p.num_routes ? place.expert(p) : kNoExpert;
      place.advance(p, step);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (experts[i] == kNoExpert) continue;
      ptx::red_shared_add(&shared.total[experts[i]], 1);
      if (first + i * kNumThreads + ptx::thread_index() < first_of_cta) ptx::red_shared_add(&shared.before[experts[i]], 1);
    }
  }
}

// Sums of the totals before each expert, by one warp, 32 experts at a time.
DEVICE void find_starts(const RouteParams& p, SharedStorage& shared) {
  const uint32_t lane = ptx::lane_index();
  uint32_t used = 0;
  for (uint32_t first = 0; first < p.num_experts; first += 32) {
    const uint32_t expert = first + lane;
    const uint32_t own = expert < p.num_experts ? ptx::ld_shared_b32(&shared.total[expert]) : 0;
    uint32_t sum = own;  // of this lane's and of those below
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint32_t below = ptx::shfl_sync(sum, lane - distance);
      sum += lane >= distance ? below : 0;
    }
    if (expert < p.num_experts) ptx::st_shared_b32(&shared.start[expert], used + sum - own);
    used += ptx::shfl_sync(sum, 31);
  }
  if (lane == 0) ptx::st_shared_b32(&shared.used, used);
}

KERNEL(kNumThreads, 1) route_rows(GRID_CONSTANT RouteParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t thread = ptx::thread_index(), warp = thread / 32, lane = ptx::lane_index();
  const uint32_t first_of_cta = ptx::block_index() * kNumThreads, route = first_of_cta + thread;
  for (uint32_t expert = thread; expert < p.num_experts; expert += kNumThreads) {
    ptx::st_shared_b32(&shared.total[expert], 0);
    ptx::st_shared_b32(&shared.before[expert], 0);
    for (uint32_t w = 0; w < kWarps; ++w) ptx::st_shared_b32(&shared.next[w][expert], 0);
  }
  ptx::syncthreads();

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait
  count_all(p, shared, first_of_cta);
  const uint32_t expert = route < p.num_routes ? Place(p, route).expert(p) : kNoExpert;
  const uint32_t same = ptx::match_any_sync(expert), rank = ptx::popc(same & ((1u << lane) - 1));
  if (expert != kNoExpert && rank == 0) ptx::st_shared_b32(&shared.next[warp][expert], ptx::popc(same));
  ptx::syncthreads();

  if (warp == 0) find_starts(p, shared);
  ptx::syncthreads();

  for (uint32_t of = thread; of < p.num_experts; of += kNumThreads) {
    const uint32_t start = ptx::ld_shared_b32(&shared.start[of]), total = ptx::ld_shared_b32(&shared.total[of]);
    uint32_t row = start + ptx::ld_shared_b32(&shared.before[of]);
    for (uint32_t w = 0; w < kWarps; ++w) {
      const uint32_t routes = ptx::ld_shared_b32(&shared.next[w][of]);
      ptx::st_shared_b32(&shared.next[w][of], row);
      row += routes;
    }
    if (ptx::block_index() == 0) {
      ptx::st_global_b32(p.counts + of, total);
      ptx::st_global_b32(p.ends + of, start + total);
    }
  }
  ptx::syncthreads();

  if (route >= p.num_routes) return;
  if (expert != kNoExpert) {
    const uint32_t row = ptx::ld_shared_b32(&shared.next[warp][expert]) + rank;
    ptx::st_global_b32(p.row_of + route, row);
    ptx::st_global_b32(p.token_of + row, route / p.topk);
    ptx::st_global_b32(p.ids + row, expert);
  } else {
    ptx::st_global_b32(p.row_of + route, ~0u);
  }
  if (route >= ptx::ld_shared_b32(&shared.used)) {  // a row without a token has the number of some route, as any row
    ptx::st_global_b32(p.token_of + route, ~0u);
    ptx::st_global_b32(p.ids + route, ~0u);
  }
}
