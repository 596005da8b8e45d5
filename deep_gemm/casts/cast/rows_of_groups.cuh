// Rows of groups whose sizes only the GPU knows. Each CTA counts the units of all groups, and CTAs split the units.
#pragma once
#include "lanes.cuh"

constexpr uint32_t kGroupsPerThread = kMaxGroups / kNumThreads;
constexpr uint32_t kWarps = kNumThreads / 32;

struct SharedStorage {
  uint32_t first_unit[kMaxGroups];
  uint32_t row[kMaxGroups], end[kMaxGroups];
  uint32_t units_of_warp[kWarps];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "CastConfig.shared_bytes and SharedStorage differ");

constexpr bool kScalesOfGroups = !kGroupsEnd;

// If kGroupsEnd, `sizes` are ends, and a group begins at the aligned end of the previous group. Else `sizes` are
// counts, x is [groups, m / num_groups, ...], and the first `count` rows of a group are cast.
DEVICE Unit rows_of_group(const CastParams& p, uint32_t group) {
  if constexpr (kGroupsEnd) {
    const int32_t last = ptx::ld_global_i32(p.sizes + group);
    const int32_t before = group == 0 ? 0 : ptx::ld_global_i32(p.sizes + group - 1);
    const uint32_t row = ceil_div(before < 0 ? 0 : before, p.alignment) * p.alignment;
    const uint32_t some = last < 0 ? 0 : last, end = some < p.m ? some : p.m;
    return {row, row < end ? end : row, group};
  } else {
    const int32_t count = ptx::ld_global_i32(p.sizes + group);
    const uint32_t most = p.m / p.num_groups, row = group * most, some = count < 0 ? 0 : count;
    return {row, row + (some < most ? some : most), group};
  }
}

struct Rows {
  static constexpr bool kIsShared = true;
  const SharedStorage& shared;
  uint32_t num_units, num_groups;

  DEVICE explicit Rows(const CastParams& p) : shared(ptx::dynamic_shared<SharedStorage>()), num_groups(p.num_groups) {
    SharedStorage& made = ptx::dynamic_shared<SharedStorage>();
    const uint32_t thread = ptx::thread_index(), lane = ptx::lane_index(), first = thread * kGroupsPerThread;
    uint32_t units[kGroupsPerThread], of_thread = 0;
#pragma unroll
    for (uint32_t i = 0; i < kGroupsPerThread; ++i) {
      const uint32_t group = first + i;
      units[i] = 0;
      if (group < p.num_groups) {
        const Unit rows = rows_of_group(p, group);
        units[i] = ceil_div(rows.end - rows.row, kRows);
        ptx::st_shared_b32(&made.row[group], rows.row);
        ptx::st_shared_b32(&made.end[group], rows.end);
      }
      of_thread += units[i];
    }
    const uint32_t sum = sum_up_to_lane(of_thread, lane);
    if (lane == 31) ptx::st_shared_b32(&made.units_of_warp[thread / 32], sum);
    ptx::syncthreads();
    uint32_t before = sum - of_thread;
    num_units = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < kWarps; ++warp) {
      const uint32_t of_warp = ptx::ld_shared_b32(&made.units_of_warp[warp]);
      before += warp < thread / 32 ? of_warp : 0;
      num_units += of_warp;
    }
#pragma unroll
    for (uint32_t i = 0; i < kGroupsPerThread; ++i) {
      if (first + i < p.num_groups) ptx::st_shared_b32(&made.first_unit[first + i], before);
      before += units[i];
    }
    ptx::syncthreads();
  }

  DEVICE Unit unit(uint32_t i) const {
    if (i >= num_units) return {0, 0, 0};
    uint32_t group = 0, above = num_groups;  // finds the last group that begins at unit i or earlier
    while (above - group > 1) {
      const uint32_t middle = (group + above) / 2;
      if (ptx::ld_shared_b32(&shared.first_unit[middle]) <= i)
        group = middle;
      else
        above = middle;
    }
    const uint32_t row = ptx::ld_shared_b32(&shared.row[group]) + (i - ptx::ld_shared_b32(&shared.first_unit[group])) * kRows;
    return {row, ptx::ld_shared_b32(&shared.end[group]), kScalesOfGroups ? group : 0};
  }
};
