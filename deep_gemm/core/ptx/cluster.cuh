// Thread block clusters: rank, barrier, distributed shared memory. (PTX ISA, "Cluster of Cooperative Thread Arrays",
// "barrier.cluster" and "mapa".)
//
// A CTA's memory may be accessed only while the CTA runs. So a cluster barrier is needed between the CTA's start and
// the first access from another CTA, and between the last access and the CTA's end.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads that have not exited call it, each warp converged. After the wait, all earlier writes are visible.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Only announces that this thread has arrived. It orders no memory accesses, so it needs no memory barrier.
DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Maps an address of this CTA to the same offset in CTA `cta_rank`, as an address of the shared::cluster window.
DEVICE uint32_t mapa(const void* pointer, uint32_t cta_rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(pointer)), "r"(cta_rank));
  return remote;
}

// Stores 16 bytes in CTA `cta_rank` and does not wait until they arrive. The mbarrier of that CTA expects and counts
// the bytes. That CTA's threads may read the bytes after mbarrier_wait_parity_cluster. (PTX ISA, "st.async".)
DEVICE void st_async_v4_f32(void* pointer, uint64_t* barrier, uint32_t cta_rank, float x, float y, float z, float w) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   mapa(pointer, cta_rank)),
               "f"(x), "f"(y), "f"(z), "f"(w), "r"(mapa(barrier, cta_rank))
               : "memory");
}

// The same for 8 bytes and for 4 bytes.
DEVICE void st_async_v2_b32(void* pointer, uint64_t* barrier, uint32_t cta_rank, uint32_t a, uint32_t b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                   mapa(pointer, cta_rank)),
               "r"(a), "r"(b), "r"(mapa(barrier, cta_rank))
               : "memory");
}
DEVICE void st_async_b32(void* pointer, uint64_t* barrier, uint32_t cta_rank, uint32_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(mapa(pointer, cta_rank)),
               "r"(value), "r"(mapa(barrier, cta_rank))
               : "memory");
}

}  // namespace ptx
