// Barriers in shared memory that count arrivals and bytes. (PTX ISA, "Parallel Synchronization and Communication
// Instructions: mbarrier".) A phase completes when all arrivals and all announced bytes have come; the next begins at once.
#pragma once
#include "ptx/memory.cuh"

namespace ptx {

DEVICE void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the other CTAs of the cluster and to TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Announces `bytes` that TMA will bring in this phase, and arrives.
DEVICE void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives at the barrier at the same place in the shared memory of CTA `rank` of the cluster. Not .release.cluster, which
// waits for all of the thread's memory accesses and made the whole product a third slower on an H200: what the arrival
// hands over has only been read, and what was read is in registers.
DEVICE void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_address(barrier)),
      "r"(rank)
      : "memory");
}

// Returns once the phase of this parity has completed.
DEVICE void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// Whether the phase of this parity has completed. Not try_wait, which suspends the warp for microseconds if it has not.
DEVICE bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

}  // namespace ptx
