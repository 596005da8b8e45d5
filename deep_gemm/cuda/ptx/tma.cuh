// The tensor memory accelerator: boxes of a tensor in global memory to and from shared memory. (PTX ISA, "Data Movement
// and Conversion Instructions: cp.async.bulk.tensor".) Coordinates count elements, innermost first. What lies outside the
// tensor is loaded as zero and not stored.
#pragma once
#include "ptx/memory.cuh"

namespace ptx {

// CUtensorMap, which the driver encodes on the host.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

DEVICE void prefetch_tensormap(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Loads one box; its bytes complete on `barrier`.
DEVICE void tma_load_2d(const TensorMap* map, uint64_t* barrier, void* destination, uint32_t x, uint32_t y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y)
      : "memory");
}

// Loads one box into the same place of every CTA in `ctas`; in each, its bytes complete on the barrier at the same place.
DEVICE void tma_load_2d_multicast(const TensorMap* map, uint64_t* barrier, void* destination, uint32_t x, uint32_t y,
                                  uint32_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "h"(static_cast<uint16_t>(ctas)), "r"(x), "r"(y)
      : "memory");
}

DEVICE void tma_store_2d(const TensorMap* map, const void* source, uint32_t x, uint32_t y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(x), "r"(y)
               : "memory");
}

// Adds to what lies there, in the L2.
DEVICE void tma_reduce_add_2d(const TensorMap* map, const void* source, uint32_t x, uint32_t y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(x), "r"(y)
               : "memory");
}

// Makes one group of the stores that this thread has issued since the last.
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kGroups of this thread's groups have shared memory still to read.
template <int kGroups>
DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by TMA and WGMMA, which take another path.
DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace ptx
