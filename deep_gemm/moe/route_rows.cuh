// Gives each route (one expert of one token) a row. Rows are stacked by expert without gaps, and within an expert by route, so
// the result is the same each time.
//
//   row of a route = its expert's first row + that expert's routes before this CTA's + its routes before this one in this CTA
//
// CTA i gives rows to kNumThreads routes. TOTALS counts an expert's routes: all, and those before this CTA's. If routes are
// few, each CTA counts them; if they are many, count_routes has made a table.
#pragma once
#include "lanes.cuh"
#include "ptx/warp.cuh"
#include "route/params.cuh"

constexpr uint32_t kWarps = kNumThreads / 32;
constexpr uint32_t kWarpsAtOnce = 8;  // a thread loads the counters of these warps before it waits for the first
static_assert(kWarps % kWarpsAtOnce == 0);

struct SharedStorage {
  uint32_t total[kMaxExperts], before[kMaxExperts];  // routes of each expert: in all CTAs, and in the CTAs before this one
  uint32_t next[kWarps][kMaxExperts];  // routes of each expert in a warp; later the row of the first such route
  uint32_t of_warp[kWarps];            // routes of the experts that a warp's threads look at
};
static_assert(kWarps == 32 && kMaxExperts <= kNumThreads, "a lane for each warp, and a thread for each expert");
static_assert(sizeof(SharedStorage) == kSharedBytes, "RouteConfig.shared_bytes and SharedStorage differ");

#include TOTALS  // find_totals: adds to `total` and `before`, which are zero

struct Starts {
  uint32_t own, used;  // first row of this thread's expert; number of rows with a token
};

// Finds the first row of each expert, one expert for each thread: sums totals up within each warp, then over the warps.
DEVICE Starts find_starts(SharedStorage& shared, uint32_t total) {
  const uint32_t lane = ptx::lane_index(), warp = ptx::thread_index() / 32;
  const uint32_t in_warp = sum_up_to_lane(total, lane);
  if (lane == 31) ptx::st_shared_b32(&shared.of_warp[warp], in_warp);
  ptx::syncthreads();
  const uint32_t of_warps = sum_up_to_lane(ptx::ld_shared_b32(&shared.of_warp[lane]), lane);
  const uint32_t before = ptx::shfl_sync(of_warps, warp - 1);
  return {(warp > 0 ? before : 0) + in_warp - total, ptx::shfl_sync(of_warps, 31)};
}

KERNEL(kNumThreads, 1) route_rows(GRID_CONSTANT RouteParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t thread = ptx::thread_index(), warp = thread / 32, lane = ptx::lane_index();
  const uint32_t route = ptx::block_index() * kNumThreads + thread;
  const uint32_t left = ceil_div(p.num_routes - ptx::block_index() * kNumThreads, 32);
  const uint32_t warps = left < kWarps ? left : kWarps;  // warps that have routes
  const bool has_expert = thread < p.num_experts;
  const Place own(p, route);
  if (has_expert) {
    ptx::st_shared_b32(&shared.total[thread], 0);
    ptx::st_shared_b32(&shared.before[thread], 0);
    for (uint32_t w = 0; w < warps; ++w) ptx::st_shared_b32(&shared.next[w][thread], 0);
  }
  ptx::syncthreads();

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  const ptx::Uint2 id = route < p.num_routes ? own.id(p) : kNoId;
  find_totals(p, shared);  // here, so that its loads start before the id arrives
  const uint32_t expert = expert_of(p, id);
  const uint32_t same = ptx::match_any_sync(expert), rank = ptx::popc(same & ((1u << lane) - 1));
  if (expert != kNoExpert && rank == 0) ptx::st_shared_b32(&shared.next[warp][expert], ptx::popc(same));
  ptx::syncthreads();

  const uint32_t total = has_expert ? ptx::ld_shared_b32(&shared.total[thread]) : 0;
  const Starts start = find_starts(shared, total);
  if (has_expert) {
    uint32_t row = start.own + ptx::ld_shared_b32(&shared.before[thread]);
#pragma unroll 1
    for (uint32_t first = 0; first < warps; first += kWarpsAtOnce) {
      uint32_t routes[kWarpsAtOnce];  // undefined for warps without routes, which do not read these rows
#pragma unroll
      for (uint32_t w = 0; w < kWarpsAtOnce; ++w) routes[w] = ptx::ld_shared_b32(&shared.next[first + w][thread]);
#pragma unroll
      for (uint32_t w = 0; w < kWarpsAtOnce; ++w) {
        ptx::st_shared_b32(&shared.next[first + w][thread], row);
        row += routes[w];
      }
    }
    if (ptx::block_index() == 0) {
      ptx::st_global_b32(p.counts + thread, total);
      ptx::st_global_b32(p.ends + thread, start.own + total);
    }
  }
  ptx::syncthreads();

  if (route >= p.num_routes) return;
  const uint32_t row = expert != kNoExpert ? ptx::ld_shared_b32(&shared.next[warp][expert]) + rank : ~0u;
  if (row < p.num_routes) {  // false if a late rank has changed the ids since they were counted
    ptx::st_global_b32(p.row_of + route, row);
    ptx::st_global_b32(p.token_of + row, route / p.topk);
    ptx::st_global_b32(p.ids + row, expert);
  } else {
    ptx::st_global_b32(p.row_of + route, ~0u);
  }
  if (route >= start.used) {  // a row without a token is filled by the thread of the route with the same number
    ptx::st_global_b32(p.token_of + route, ~0u);
    ptx::st_global_b32(p.ids + route, ~0u);
  }
}
