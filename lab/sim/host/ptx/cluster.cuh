#pragma once
#include "ptx/platform.cuh"

namespace ptx {

uint32_t cluster_rank();
void cluster_arrive();
void cluster_arrive_relaxed();
void cluster_wait();
void cluster_sync();
uint32_t mapa(const void* pointer, uint32_t cta_rank);
void st_async_v4_f32(void* pointer, uint64_t* barrier, uint32_t cta_rank, float x, float y, float z, float w);
void st_async_v2_b32(void* pointer, uint64_t* barrier, uint32_t cta_rank, uint32_t a, uint32_t b);
void st_async_b32(void* pointer, uint64_t* barrier, uint32_t cta_rank, uint32_t value);

}  // namespace ptx
