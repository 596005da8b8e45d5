#pragma once
#include "ptx/platform.cuh"

namespace ptx {

void prefetch_l2(const void* address);

void cp_async_16(void* shared, const void* global);
void cp_async_wait_all();

float ld_shared_f32(uint32_t address);
float ld_shared_f32(const void* pointer);
Float2 ld_shared_v2_f32(uint32_t address);
Float2 ld_shared_v2_f32(const void* pointer);
Float4 ld_shared_v4_f32(uint32_t address);
Float4 ld_shared_v4_f32(const void* pointer);
uint32_t ld_shared_b32(const void* pointer);
uint32_t ld_shared_u16(uint32_t address);
Uint2 ld_shared_v2_b32(const void* pointer);
Uint4 ld_shared_v4_b32(uint32_t address);
Uint4 ld_shared_v4_b32(const void* pointer);
void st_shared_b32(void* pointer, uint32_t value);
void red_shared_add(uint32_t* pointer, uint32_t value);
void red_shared_or(uint32_t* pointer, uint32_t bits);
void st_shared_f32(void* pointer, float value);
void st_shared_v2_b32(void* pointer, uint32_t a, uint32_t b);
void st_shared_v2_f32(void* pointer, float x, float y);
void st_shared_v4_b32(void* pointer, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void st_shared_v4_b32(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void stmatrix_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d);

float ld_global_f32(const void* pointer);
Float2 ld_global_v2_f32(const void* pointer);
Float4 ld_global_v4_f32(const void* pointer);
uint32_t ld_global_b32(const void* pointer);
Uint2 ld_global_v2_b32(const void* pointer);
uint32_t ld_global_b16(const void* pointer);
Uint4 ld_global_v4_b32(const void* pointer);
int32_t ld_global_i32(const void* pointer);
float ld_global_nc_f32(const void* pointer);
int32_t ld_global_nc_i32(const void* pointer);
uint32_t ld_global_nc_b16(const void* pointer);
uint32_t ld_global_nc_b32(const void* pointer);
Uint4 ld_global_nc_v4_b32(const void* pointer);
void st_global_b8(void* pointer, uint32_t value);
void st_global_b16(void* pointer, uint32_t value);
void st_global_f32(void* pointer, float value);
void st_global_b32(void* pointer, uint32_t value);
void st_global_v2_b32(void* pointer, uint32_t a, uint32_t b);
void st_global_v2_f32(void* pointer, float x, float y);
void st_global_v4_f32(void* pointer, float x, float y, float z, float w);
void st_global_v4_b32(void* pointer, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
uint32_t atom_add(uint32_t* pointer, uint32_t value);
uint32_t atom_add_acq_rel_b32(uint32_t* pointer, uint32_t value);
void red_release_gpu_add_b32(uint32_t* pointer, uint32_t value);
uint32_t ld_acquire_gpu_b32(const uint32_t* pointer);
uint32_t ld_relaxed_gpu_b32(const void* pointer);
void st_release_sys_b32(uint32_t* pointer, uint32_t value);
uint32_t ld_acquire_sys_b32(const uint32_t* pointer);
uint64_t global_timer();

float fma(float a, float b, float c);
float mul_rn(float a, float b);
float add_rn(float a, float b);
float fma_rn(float a, float b, float c);
float ex2_approx(float x);
float rcp_approx(float x);
float lg2_approx(float x);
float min_nan(float a, float b);
float min_magnitude(float x, float most);
float abs_f32(float x);
float max_f32(float a, float b);
uint32_t max_bf16x2(uint32_t a, uint32_t b);
uint32_t max_f16x2(uint32_t a, uint32_t b);
float max_nan_f32(float a, float b);
uint32_t max_nan_bf16x2(uint32_t a, uint32_t b);
uint32_t max_nan_f16x2(uint32_t a, uint32_t b);
uint32_t pack_e4m3(float low, float high);
uint32_t pack_bf16(float low, float high);
Float2 unpack_bf16(uint32_t packed);
Float2 unpack_f16(uint32_t packed);
uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector);
uint32_t bits_of(float value);
float float_of(uint32_t bits);

}  // namespace ptx
