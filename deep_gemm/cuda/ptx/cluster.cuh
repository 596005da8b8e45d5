// The CTAs of a cluster, which run at once and reach each other's shared memory.
#pragma once
#include "ptx/memory.cuh"

namespace ptx {

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all CTAs. What each wrote before is visible to all after.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

}  // namespace ptx
