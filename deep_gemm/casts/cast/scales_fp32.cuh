// Scales in FP32, with any strides.
#pragma once

DEVICE void store_scale(const CastParams& p, uint32_t row, uint32_t group, uint32_t block, float scale) {
  ptx::st_global_f32(
      scale_at(p.scales, row, p.scales_stride_m, block, p.scales_stride_k) + uint64_t{group} * p.scales_stride_g, scale);
}
