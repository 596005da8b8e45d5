// Data of groups along k from k_group_maps to fp8_gemm: each group's tensor maps, and the places of its scales and D.
#pragma once
#include "ptx/tma.cuh"
#include "types.cuh"

constexpr uint32_t kDepthOfBlock = 128;

// One group; an array of these holds the deepest first.
struct KGroup {
  ptx::TensorMap map_a, map_b;
  uint32_t first_k_block;  // of the scales
  uint32_t num_k_blocks;
  uint32_t group;  // which plane of C and D
};
static_assert(sizeof(KGroup) == 320, "gemm/depths.py makes room for 320 bytes each");

// Behind the groups lies the number of tiles that clusters have claimed, besides their first ones: see k_scheduler.cuh.
DEVICE uint32_t* next_tile_counter(const KGroup* k_groups, uint32_t count) {
  return reinterpret_cast<uint32_t*>(const_cast<KGroup*>(k_groups) + count);
}
