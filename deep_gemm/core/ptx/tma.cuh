// TMA: copies of boxes of a tensor between global and shared memory. (PTX ISA, "Data Movement and Conversion
// Instructions: Tensor copy", and "Tensors" for boxes, swizzling and what happens out of bounds.)
//
// Coordinates count elements, innermost dimension first. A box may extend beyond the tensor on any side: elements there
// are loaded as zeros and not stored. One thread issues a copy, which accesses shared memory through the async proxy.
#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// A tensor map. The driver's cuTensorMapEncodeTiled makes its content.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

DEVICE void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Makes this thread's writes to shared memory visible to TMA and WGMMA. Every writing thread must execute it before its
// barrier with the thread that issues the TMA copy or WGMMA. (PTX ISA, "Async proxy".)
DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for writes to global memory.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// An access policy for the L2. (PTX ISA, "createpolicy".) Not volatile: all loads may share one policy.
DEVICE uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- Loads: the loaded bytes are subtracted from the bytes that `barrier` expects.

DEVICE void tma_load_2d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}

// The same for data that is read only once: the L2 evicts this data first.
DEVICE void tma_load_2d_evict_first(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "l"(evict_first_policy())
      : "memory");
}

// Loads one box into every CTA whose bit of `cta_mask` is set, to the same offset in each CTA. Each of these CTAs
// expects the bytes on its own barrier, at the same offset as `barrier`.
DEVICE void tma_load_2d_multicast(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                                  uint32_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "h"(static_cast<uint16_t>(cta_mask)), "r"(c0), "r"(c1)
      : "memory");
}

DEVICE void tma_load_3d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                        int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DEVICE void tma_load_3d_evict_first(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                                    int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "l"(evict_first_policy())
      : "memory");
}

DEVICE void tma_load_3d_multicast(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                                  int32_t c2, uint32_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "h"(static_cast<uint16_t>(cta_mask)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DEVICE void tma_load_4d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                        int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Loads a multiple of 16 bytes from any address of global memory, also of a peer GPU. (PTX ISA, "cp.async.bulk".)
DEVICE void bulk_load(uint64_t* barrier, void* destination, const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   smem_address(destination)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
}

// Loads a box only into the L2.
DEVICE void tma_prefetch_2d(const TensorMap* map, int32_t c0, int32_t c1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1) : "memory");
}
DEVICE void tma_prefetch_3d(const TensorMap* map, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

DEVICE void tma_prefetch_4d(const TensorMap* map, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// ---- Stores: `tma_store_commit` makes a group of them. The thread that issued the stores waits for the group.

DEVICE void tma_store_2d(const TensorMap* map, const void* source, int32_t c0, int32_t c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(c0), "r"(c1)
               : "memory");
}

DEVICE void tma_store_3d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

DEVICE void tma_store_4d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Adds the box to the elements in global memory, in the map's element type.
DEVICE void tma_reduce_add_2d(const TensorMap* map, const void* source, int32_t c0, int32_t c1) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(c0), "r"(c1)
               : "memory");
}

DEVICE void tma_reduce_add_3d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

DEVICE void tma_reduce_add_4d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2,
                              int32_t c3) {
  asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(smem_address(source)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Stores a multiple of 16 bytes to any address of global memory, also of a peer GPU. (PTX ISA, "cp.async.bulk".)
DEVICE void bulk_store(void* global, const void* source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem_address(source)),
               "r"(bytes)
               : "memory");
}

DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups still read shared memory. Other groups' memory is free.
template <int kPending>
DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

}  // namespace ptx
