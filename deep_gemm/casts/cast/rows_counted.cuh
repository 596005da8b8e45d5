// The first rows of each group: x is [groups, m / num_groups, ...], and `sizes` are counts.
#pragma once

constexpr bool kScalesOfGroups = true;

DEVICE Unit rows_of_group(const CastParams& p, uint32_t group) {
  const int32_t count = ptx::ld_global_i32(p.sizes + group);
  const uint32_t most = p.m / p.num_groups, row = group * most, some = count < 0 ? 0 : count;
  return {row, row + (some < most ? some : most), group};
}
#include "cast/rows_of_groups.cuh"
