// Counts the routes of each expert in each part, before route_rows runs, if there are many routes. A part is the kPart routes
// that one CTA of route_rows serves. CTA i counts part i.
#pragma once
#include "ptx/warp.cuh"
#include "route/params.cuh"

constexpr uint32_t kOfThread = kPart / kNumThreads;  // routes of a thread, all loaded before it waits

struct SharedStorage {
  uint32_t count[kMaxExperts];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "CountConfig.shared_bytes and SharedStorage differ");

KERNEL(kNumThreads, 1) count_routes(GRID_CONSTANT RouteParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t thread = ptx::thread_index(), first = ptx::block_index() * kPart + thread;
  for (uint32_t expert = thread; expert < p.num_experts; expert += kNumThreads)
    ptx::st_shared_b32(&shared.count[expert], 0);
  const Place step(p, kNumThreads);
  Place place(p, first);
  ptx::syncthreads();

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  ptx::Uint2 ids[kOfThread];
#pragma unroll
  for (uint32_t i = 0; i < kOfThread; ++i) {
    ids[i] = first + i * kNumThreads < p.num_routes ? place.id(p) : kNoId;
    place.advance(p, step);
  }
#pragma unroll
  for (uint32_t i = 0; i < kOfThread; ++i) {
    const uint32_t expert = expert_of(p, ids[i]);
    if (expert != kNoExpert) ptx::red_shared_add(&shared.count[expert], 1);
  }
  ptx::syncthreads();

  uint32_t* counts = p.of_parts + uint64_t{ptx::block_index()} * p.num_experts;
  for (uint32_t expert = thread; expert < p.num_experts; expert += kNumThreads)
    ptx::st_global_b32(counts + expert, ptx::ld_shared_b32(&shared.count[expert]));
}
