// Makes the tensor maps of groups along k on the GPU, because the host may not know the groups' depths. It runs before
// fp8_gemm, which reads the maps in their own memory: no map changes while a copy of it may be read.
//
// Each group has a thread, which reads all depths. The sum of the depths of earlier groups says where this group's
// operands begin. The number of greater depths is the group's index in order of depth, the deepest first.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/tensormap.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"
#include "work/k_groups.cuh"

constexpr uint32_t kMapThreads = 32;
// About the most depths that fit in 4 KB of parameters.
constexpr uint32_t kMaxInlineKs = 896;

struct MapParams {
  ptx::TensorMap map_a, map_b;  // maps of any group's operands: all groups have the same boxes and swizzles
  const uint8_t *a, *b;         // operands of all groups, one after another
  KGroup* k_groups;
  const int32_t* ks;  // null: the depths are in inline_ks
  uint32_t m, n, count;
  uint32_t sum_k, num_k_blocks;  // of all groups: depth of the values, k-blocks of the scales
  int32_t inline_ks[kMaxInlineKs];
};
#include "map_params_layout.cuh"  // asserts that the layout of MapParams is what core/params.py packs

DEVICE uint32_t at_most(uint32_t value, uint32_t limit) { return value < limit ? value : limit; }
DEVICE uint32_t rest_of(uint32_t all, uint32_t first) { return first < all ? all - first : 0; }

struct Place {
  uint32_t k, first_k, first_k_block;
  uint32_t number;  // index in order of depth, the deepest first
};

template <bool kIsInline>
DEVICE uint32_t k_of_group(const MapParams& p, uint32_t group) {
  int32_t k;
  if constexpr (kIsInline) k = p.inline_ks[group]; else k = ptx::ld_global_i32(p.ks + group);
  return k < 0 ? 0 : static_cast<uint32_t>(k) / 16 * 16;  // TMA needs rows of whole 16 bytes
}

template <bool kIsInline>
DEVICE Place place_of(const MapParams& p, uint32_t group) {
  constexpr uint32_t kEach = 16;  // loads in flight at a time
  Place place{k_of_group<kIsInline>(p, group), 0, 0, 0};
#pragma unroll 1
  for (uint32_t first = 0; first < p.count; first += kEach) {
    uint32_t ks[kEach];
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) ks[i] = k_of_group<kIsInline>(p, at_most(first + i, p.count - 1));
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const bool is_before = first + i < group;
      place.first_k += is_before ? ks[i] : 0;
      place.first_k_block += is_before ? ceil_div(ks[i], kDepthOfBlock) : 0;
      const bool is_ahead = (ks[i] > place.k) | ((ks[i] == place.k) & is_before);  // no branches: all loads together
      place.number += (first + i < p.count) & is_ahead;
    }
  }
  // Limits the sizes, so that no depths lead outside the operands.
  place.k = at_most(place.k, rest_of(p.sum_k, place.first_k));
  place.k = at_most(place.k, rest_of(p.num_k_blocks, place.first_k_block) * kDepthOfBlock);
  place.first_k = at_most(place.first_k, p.sum_k);
  return place;
}

// Makes a map of row-major [rows, k]. A group of depth 0 gets a legal map, which is never used.
DEVICE void make_map(ptx::TensorMap* map, const ptx::TensorMap& like, const uint8_t* values, uint32_t k) {
  ptx::tensormap_copy(map, like);
  ptx::tensormap_replace_address(map, values);
  ptx::tensormap_replace_size<0>(map, k == 0 ? 16 : k);
  ptx::tensormap_replace_stride<1>(map, k == 0 ? 16 : k);
}

KERNEL(kMapThreads, 1) k_group_maps(GRID_CONSTANT MapParams p) {
  ptx::griddepcontrol_launch_dependents();  // the product's kernel may start, and runs until it needs these maps
  ptx::griddepcontrol_wait();
  const uint32_t group = ptx::block_index() * kMapThreads + ptx::thread_index();
  if (group >= p.count) return;
  if (group == 0) ptx::st_global_b32(next_tile_counter(p.k_groups, p.count), 0);
  const Place place = p.ks == nullptr ? place_of<true>(p, group) : place_of<false>(p, group);
  KGroup* k_group = p.k_groups + place.number;
  make_map(&k_group->map_a, p.map_a, p.a + static_cast<uint64_t>(p.m) * place.first_k, place.k);
  make_map(&k_group->map_b, p.map_b, p.b + static_cast<uint64_t>(p.n) * place.first_k, place.k);
  ptx::fence_tensormap_release();
  ptx::st_global_b32(&k_group->first_k_block, place.first_k_block);
  ptx::st_global_b32(&k_group->num_k_blocks, ceil_div(place.k, kDepthOfBlock));
  ptx::st_global_b32(&k_group->group, group);
}
