// Groups of rows that follow each other: each begins where the one before ended, aligned, and `sizes` are their ends.
#pragma once

constexpr bool kScalesOfGroups = false;

DEVICE Unit rows_of_group(const CastParams& p, uint32_t group) {
  const int32_t last = ptx::ld_global_i32(p.sizes + group);
  const int32_t before = group == 0 ? 0 : ptx::ld_global_i32(p.sizes + group - 1);
  const uint32_t row = ceil_div(before < 0 ? 0 : before, p.alignment) * p.alignment;
  const uint32_t some = last < 0 ? 0 : last, end = some < p.m ? some : p.m;
  return {row, row < end ? end : row, group};
}
#include "cast/rows_of_groups.cuh"
