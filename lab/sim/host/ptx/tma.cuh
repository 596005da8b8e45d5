#pragma once
#include "ptx/platform.cuh"

namespace ptx {

// The simulator's own encoding, in the size of the driver's; lab/sim/arguments.py writes it.
struct alignas(64) TensorMap {
  uint64_t base;        // address of element 0, which need not exist if no box contains it
  uint64_t dims[5];     // elements, innermost first
  uint64_t strides[4];  // bytes, of dimensions 1 to 4
  uint16_t box[5];      // elements
  uint8_t rank, element_bytes, swizzle_bytes, is_f32;
  uint32_t magic;
  uint64_t tensor;      // start of the buffer that must contain every accessed element
  uint32_t is_unreleased;  // a kernel wrote it and has not released it to TMA
  static constexpr uint32_t kMagic = 0x544d4150;
};
static_assert(sizeof(TensorMap) == 128, "as large as the driver's");

void prefetch_tensormap(const TensorMap* map);
void fence_proxy_async_shared();
void fence_proxy_async_global();
inline uint64_t evict_first_policy() { return 0; }  // the simulator has no model of the L2

void tma_load_2d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1);
void tma_load_2d_evict_first(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1);
void tma_load_2d_multicast(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                           uint32_t cta_mask);
void tma_load_3d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1, int32_t c2);
void tma_load_3d_evict_first(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                             int32_t c2);
void tma_load_3d_multicast(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1, int32_t c2,
                           uint32_t cta_mask);
void tma_load_4d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1, int32_t c2,
                 int32_t c3);
void bulk_load(uint64_t* barrier, void* destination, const void* global, uint32_t bytes);
void tma_prefetch_2d(const TensorMap* map, int32_t c0, int32_t c1);
void tma_prefetch_3d(const TensorMap* map, int32_t c0, int32_t c1, int32_t c2);
void tma_prefetch_4d(const TensorMap* map, int32_t c0, int32_t c1, int32_t c2, int32_t c3);

void tma_store_2d(const TensorMap* map, const void* source, int32_t c0, int32_t c1);
void tma_store_3d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2);
void tma_store_4d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2, int32_t c3);
void tma_reduce_add_2d(const TensorMap* map, const void* source, int32_t c0, int32_t c1);
void tma_reduce_add_3d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2);
void tma_reduce_add_4d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2, int32_t c3);
void bulk_store(void* global, const void* source, uint32_t bytes);
void tma_store_commit();

template <int kPending>
void tma_store_wait_read();

}  // namespace ptx

namespace sim {
void tma_store_wait_read(uint32_t pending);
}  // namespace sim

template <int kPending>
void ptx::tma_store_wait_read() {
  sim::tma_store_wait_read(kPending);
}
