#pragma once
#include "ptx/platform.cuh"

namespace ptx {

void mbarrier_init(uint64_t* barrier, uint32_t arrivals);
void fence_mbarrier_init();
void mbarrier_arrive(uint64_t* barrier);
void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes);
void mbarrier_arrive_cluster(uint64_t* barrier, uint32_t cta_rank);
// In the simulator a load is complete when its call returns, so there is nothing to order.
inline void mbarrier_arrive_after(uint64_t* barrier, float, bool is_arriving) {
  if (is_arriving) mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_after(uint64_t* barrier, uint32_t, bool is_arriving) {
  if (is_arriving) mbarrier_arrive(barrier);
}
inline void mbarrier_arrive_cluster_after(uint64_t* barrier, uint32_t cta_rank, float, bool is_arriving) {
  if (is_arriving) mbarrier_arrive_cluster(barrier, cta_rank);
}
bool mbarrier_test_wait_parity(uint64_t* barrier, uint32_t parity);
bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity);
bool mbarrier_try_wait_parity_cluster(uint64_t* barrier, uint32_t parity);
void mbarrier_wait_parity(uint64_t* barrier, uint32_t parity);
void mbarrier_wait_parity_cluster(uint64_t* barrier, uint32_t parity);

}  // namespace ptx
