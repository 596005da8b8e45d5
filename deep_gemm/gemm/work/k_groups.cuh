// Data that k_group_maps writes for fp8_gemm: each group's tensor maps, and the positions of its scales and of D.
#pragma once
#include "ptx/tma.cuh"
#include "types.cuh"

constexpr uint32_t kDepthOfBlock = 128;

// One group; an array of groups begins with the deepest group.
struct KGroup {
  ptx::TensorMap map_a, map_b;
  uint32_t first_k_block;  // first k-block of the group's scales
  uint32_t num_k_blocks;
  uint32_t group;  // plane of C and D
};
static_assert(sizeof(KGroup) == 320, "gemm/depths.py makes room for 320 bytes each");

// After the groups comes a counter of the tiles that clusters have claimed after their first tile: see k_scheduler.cuh.
DEVICE uint32_t* next_tile_counter(const KGroup* k_groups, uint32_t count) {
  return reinterpret_cast<uint32_t*>(const_cast<KGroup*>(k_groups) + count);
}
