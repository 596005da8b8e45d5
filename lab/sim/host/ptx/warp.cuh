#pragma once
#include "ptx/platform.cuh"

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

}  // namespace ptx
