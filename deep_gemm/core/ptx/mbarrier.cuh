// mbarrier: a phase completes when all expected arrivals came and all announced bytes landed.
// (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".)
//
// Phases alternate between parity 0 and 1. Waiting for a parity returns once the phase of that parity is over, so on
// a new barrier a wait for 0 blocks, and a wait for 1 returns at once.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Shows the initialized barriers to the cluster's other CTAs and to TMA; a block or cluster barrier must follow.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Arrives, if `is_arriving`, once the load of `loaded` is done, the warp's last load from shared memory. By itself a
// load in flight does not hold up an arrival, whatever the memory model says: on an H200, queued behind other warps'
// loads, it read data that TMA wrote after the arrival. (An odd number and an address differ; ptxas does not see that.
// One predicate for both conditions, because a branch in the loop costs more.)
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

// One arrival, which also announces `bytes` that TMA will bring in this phase.
DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the barrier that lies at the same offset in CTA `cta_rank` of the cluster, which may be this one. It gives
// back memory that this CTA has read. To publish writes into the other CTA, use a cluster barrier:
// .release.cluster would do it here, but compiles to a memory barrier each time.
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

// The same if `is_arriving`, once the load of `loaded` is done; see mbarrier_arrive_after.
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
// Asks whether the phase is over and returns at once. It is test_wait, because try_wait on a phase that is not due
// suspends the warp for microseconds (measured on an H200).
PTX_ASK_PHASE(mbarrier_test_wait_parity, "mbarrier.test_wait.parity.shared::cta.b64")
// Asks whether the phase is over, and may suspend the warp until it is, or for as long as the hardware sees fit.
PTX_ASK_PHASE(mbarrier_try_wait_parity, "mbarrier.try_wait.parity.shared::cta.b64")
PTX_ASK_PHASE(mbarrier_try_wait_parity_cluster, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64")

DEVICE void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// The same, where the awaited data was written by other CTAs of the cluster.
DEVICE void mbarrier_wait_parity_cluster(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity_cluster(barrier, parity)) {
  }
}

}  // namespace ptx
