// Loads scales of rows, if no scale changes along k.
#pragma once
#include "ptx/memory.cuh"

// Loads scales of rows `first`, `first + step`, ... Past the last row it loads the last row's: no address is outside.
template <uint32_t kCount>
DEVICE void load_scales(float (&to)[kCount], const float* sf, uint64_t stride, uint32_t first, uint32_t step, uint32_t rows) {
#pragma unroll
  for (uint32_t i = 0, row = first; i < kCount; ++i, row += step) to[i] = ptx::ld_global_f32(sf + (row < rows ? row : rows - 1) * stride);
}
