// Rows of experts: each route, one expert of one token, gets a row, the rows being stacked by expert without gaps, and by route
// within an expert. So it is the same each time.
//
//   row of a route = where its expert's rows start + routes of that expert before this CTA's + before it in this CTA
//
// CTA i gives rows to kNumThreads routes. How many an expert has in all, and before the CTA's, TOTALS finds: few routes are
// counted by each CTA, of many count_routes has made a table.
#pragma once
#include "ptx/warp.cuh"
#include "route/params.cuh"

constexpr uint32_t kWarps = kNumThreads / 32;

struct SharedStorage {
  uint32_t total[kMaxExperts], before[kMaxExperts];  // routes of each expert: of all, of the CTAs before
  uint32_t start[kMaxExperts];                       // its first row
  uint32_t next[kWarps][kMaxExperts];  // routes of each expert that a warp has; then the row of the first of them
  uint32_t used;                       // rows that have a token
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "RouteConfig.shared_bytes and SharedStorage differ");

#include TOTALS  // find_totals: adds to `total` and `before`, which are zero

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
  const uint32_t route = ptx::block_index() * kNumThreads + thread;
  for (uint32_t expert = thread; expert < p.num_experts; expert += kNumThreads) {
    ptx::st_shared_b32(&shared.total[expert], 0);
    ptx::st_shared_b32(&shared.before[expert], 0);
    for (uint32_t w = 0; w < kWarps; ++w) ptx::st_shared_b32(&shared.next[w][expert], 0);
  }
  ptx::syncthreads();

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait
  const uint32_t expert = route < p.num_routes ? Place(p, route).expert(p) : kNoExpert;
  find_totals(p, shared);
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
  if (p.arrivals != nullptr && route % kRowsOfPart == 0) {
    ptx::st_global_b32(p.arrivals + 1 + route / kRowsOfPart, 0);
    if (route == 0) ptx::st_global_b32(p.arrivals, 0);
  }
  const uint32_t row = expert != kNoExpert ? ptx::ld_shared_b32(&shared.next[warp][expert]) + rank : ~0u;
  if (row < p.num_routes) {  // not where a rank that comes too late has written ids anew since they were counted
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
