// count_routes has counted each part. A CTA adds up the columns of that table, and separately the parts before its own.
//
//   threads  0 .. experts-1 | .. 2 experts-1 | ...      the table's words in order, so the lanes of a warp read adjacent words
//   parts    0, g, 2g ...   | 1, g+1 ...     | ... g-1  of each group of threads; g is the number of groups
#pragma once

constexpr uint32_t kAtOnce = 16;  // loads that a thread starts before it waits
static_assert(kMaxExperts <= kNumThreads, "a thread for each expert at least");

DEVICE void find_totals(const RouteParams& p, SharedStorage& shared) {
  const uint32_t groups = kNumThreads / p.num_experts, group = ptx::thread_index() / p.num_experts;
  if (group >= groups) return;  // the remaining threads have no group
  const uint32_t parts = ptx::grid_size(), expert = ptx::thread_index() - group * p.num_experts;
  const uint32_t* counts = p.of_parts + ptx::thread_index();
  uint32_t total = 0, before = 0;
#pragma unroll 1
  for (uint32_t first = group; first < parts; first += groups * kAtOnce) {
    uint32_t routes[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      routes[i] = first + i * groups < parts ? ptx::ld_global_b32(counts) : 0;
      counts += groups * p.num_experts;
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      total += routes[i];
      if (first + i * groups < ptx::block_index()) before += routes[i];
    }
  }
  ptx::red_shared_add(&shared.total[expert], total);
  ptx::red_shared_add(&shared.before[expert], before);
}
