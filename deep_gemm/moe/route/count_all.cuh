// Each CTA counts all routes, and separately the routes before its own, so no CTA waits for another. All ids fit in the L2. The
// total work of all CTAs grows with the square of the number of routes.
#pragma once

constexpr uint32_t kAtOnce = 8;  // loads that a thread starts before it waits

DEVICE void find_totals(const RouteParams& p, SharedStorage& shared) {
  const uint32_t first_of_cta = ptx::block_index() * kNumThreads;
  const Place step(p, kNumThreads);
  Place place(p, ptx::thread_index());
#pragma unroll 1
  for (uint32_t first = 0; first < p.num_routes; first += kNumThreads * kAtOnce) {
    ptx::Uint2 ids[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t route = first + i * kNumThreads + ptx::thread_index();
      ids[i] = route < p.num_routes ? place.id(p) : kNoId;
      place.advance(p, step);
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t expert = expert_of(p, ids[i]);
      if (expert == kNoExpert) continue;
      ptx::red_shared_add(&shared.total[expert], 1);
      if (first + i * kNumThreads + ptx::thread_index() < first_of_cta) ptx::red_shared_add(&shared.before[expert], 1);
    }
  }
}
