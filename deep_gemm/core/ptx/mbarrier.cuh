// mbarrier: a phase completes once all expected arrivals have happened and all announced bytes have been written.
// (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".)
//
// Phases alternate between parity 0 and 1. A wait for a parity returns once the phase of that parity is over. On a new
// barrier, a wait for 0 blocks, and a wait for 1 returns at once.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the cluster's other CTAs and to TMA. A CTA or cluster barrier must follow.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives, if `is_arriving`, once the load of `loaded` is done. `loaded` must be the warp's last load from shared
// memory. The hardware does not order the arrival behind a load in flight, whatever the memory model says: on an H200,
// a load that queued behind other warps' loads read data that TMA wrote after the arrival. (`odd` never equals the
// address, but ptxas does not know this. One predicate holds both conditions, because a branch in the loop costs more.)
DEVICE void mbarrier_arrive_after(uint64_t* barrier, uint32_t loaded, bool is_arriving) {
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      ".reg .b32 odd;\n"
      "or.b32 odd, %1, 1;\n"
      "setp.ne.b32 q, %2, 0;\n"
      "setp.ne.and.b32 p, odd, %0, q;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(loaded), "r"(static_cast<uint32_t>(is_arriving))
      : "memory");
}
DEVICE void mbarrier_arrive_after(uint64_t* barrier, float loaded, bool is_arriving) {
  mbarrier_arrive_after(barrier, __float_as_uint(loaded), is_arriving);
}

// Arrives once, and announces `bytes` that TMA will load in this phase.
DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the barrier at the same offset in CTA `cta_rank` of the cluster, which may be this CTA. The arrival frees
// memory that this CTA has read. To publish writes to the other CTA, use a cluster barrier instead: .release.cluster
// would publish them here, but compiles to a memory barrier each time.
DEVICE void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t cta_rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(cta_rank)
      : "memory");
}

// Like mbarrier_arrive_cluster, but if `is_arriving` and once the load of `loaded` is done (see mbarrier_arrive_after).
DEVICE void mbarrier_arrive_cluster_after(uint64_t* barrier, uint32_t cta_rank, float loaded, bool is_arriving) {
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      ".reg .b32 odd, remote;\n"
      "or.b32 odd, %2, 1;\n"
      "setp.ne.b32 q, %3, 0;\n"
      "setp.ne.and.b32 p, odd, %0, q;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(smem_address(barrier)),
      "r"(cta_rank), "r"(__float_as_uint(loaded)), "r"(static_cast<uint32_t>(is_arriving))
      : "memory");
}

#define PTX_ASK_PHASE(name, instruction)                 \
  DEVICE bool name(uint64_t* barrier, uint32_t parity) { \
    uint32_t is_over;                                    \
    asm volatile(                                        \
        "{\n"                                            \
        ".reg .pred p;\n" instruction " p, [%1], %2;\n"  \
        "selp.b32 %0, 1, 0, p;\n"                        \
        "}"                                              \
        : "=r"(is_over)                                  \
        : "r"(smem_address(barrier)), "r"(parity)        \
        : "memory");                                     \
    return is_over != 0;                                 \
  }
// Tells whether the phase is over, and returns at once. It uses test_wait, because try_wait on an unfinished phase
// suspends the warp for microseconds (measured on an H200).
PTX_ASK_PHASE(mbarrier_test_wait_parity, "mbarrier.test_wait.parity.shared::cta.b64")
// Tells whether the phase is over. The hardware may suspend the warp until then, or until a time limit of its own.
PTX_ASK_PHASE(mbarrier_try_wait_parity, "mbarrier.try_wait.parity.shared::cta.b64")
PTX_ASK_PHASE(mbarrier_try_wait_parity_cluster, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64")

DEVICE void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Waits like mbarrier_wait_parity, for data that other CTAs of the cluster have written.
DEVICE void mbarrier_wait_parity_cluster(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity_cluster(barrier, parity)) {
  }
}

}  // namespace ptx
