#pragma once
#include "ptx/platform.cuh"

namespace sim {
void setmaxnreg_inc(uint32_t registers);
void setmaxnreg_dec(uint32_t registers);
}  // namespace sim

namespace ptx {

uint32_t thread_index();
uint32_t warp_index();
uint32_t lane_index();
uint32_t block_index();
uint32_t grid_size();

bool elect_sync();
uint32_t shfl_sync(uint32_t value, uint32_t source);
float shfl_sync(float value, uint32_t source);
float shfl_xor_sync(float value, uint32_t bits);
bool all_sync(bool value);
uint32_t ballot_sync(bool value);
uint32_t reduce_min_sync(uint32_t value);
uint32_t match_any_sync(uint32_t value);
uint32_t popc(uint32_t bits);
void syncwarp();

void syncthreads();
bool syncthreads_and(bool value);
void bar_sync(uint32_t id, uint32_t threads);
void bar_arrive(uint32_t id, uint32_t threads);

void griddepcontrol_wait();
void griddepcontrol_launch_dependents();

template <uint32_t kRegisters>
void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  sim::setmaxnreg_inc(kRegisters);
}
template <uint32_t kRegisters>
void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256 registers, a multiple of 8");
  sim::setmaxnreg_dec(kRegisters);
}

void mma_m16n8k8_tf32(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1);

}  // namespace ptx
