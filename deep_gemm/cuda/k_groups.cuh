// Products of several groups along k (weight gradients of experts): D[g] = C[g] + A_g @ B_g.T, each of a depth of its own.
//
// A_g is row-major [m, k_g]: the pitch of its rows is the group's own, and so its tensor map must be, as that of B_g.
// k_group_maps.cuh makes them ahead of this kernel, and says here what it has made. Scales and D have one map for all.
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
static_assert(sizeof(KGroup) == 320, "kernels/fp8_gemm_k_grouped.py makes room for 320 bytes each");

// Behind them lies how many tiles the CTAs have come for, besides their first ones: see k_scheduler.cuh.
DEVICE uint32_t* tiles_come_for(const KGroup* k_groups, uint32_t count) {
  return reinterpret_cast<uint32_t*>(const_cast<KGroup*>(k_groups) + count);
}
