// Loads of operands into the slots of the ring, of either major and any number of dimensions.
//
//   K-major    rows of 128 bytes along k: one box of all rows
//   MN-major   boxes of 64 rows (of A or B), each 128 bytes of them for every k of the block; 64 rows further, the next box
//
// Either way 64 rows take 64 x 128 bytes of the slot, and TMA fills what lies outside of the operand with zeros. (BF16 alone is
// loaded MN-major: WGMMA transposes no other type.)
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"

// One box, into this CTA's slot, or into those of all CTAs of the cluster.
template <bool kToAll, typename... Planes>
DEVICE void load_box(const ptx::TensorMap* map, uint64_t* full, void* to, uint32_t c0, uint32_t c1, Planes... planes) {
  static_assert(sizeof...(planes) <= 1, "boxes of two or three dimensions");
  if constexpr (sizeof...(planes) == 0) {
    if constexpr (kToAll)
      ptx::tma_load_2d_multicast(map, full, to, c0, c1, kAllCtas);
    else
      ptx::tma_load_2d(map, full, to, c0, c1);
  } else {
    if constexpr (kToAll)
      ptx::tma_load_3d_multicast(map, full, to, c0, c1, planes..., kAllCtas);
    else
      ptx::tma_load_3d(map, full, to, c0, c1, planes...);
  }
}

// So many rows from `row` on, one k-block deep from `k` on.
template <bool kIsMnMajor, uint32_t kRows, bool kToAll = false, typename... Planes>
DEVICE void load_rows(const ptx::TensorMap* map, uint64_t* full, uint8_t* to, uint32_t k, uint32_t row, Planes... planes) {
  if constexpr (kIsMnMajor) {
    static_assert(kRows % 64 == 0, "whole boxes");
#pragma unroll
    for (uint32_t i = 0; i < kRows; i += 64) load_box<kToAll>(map, full, to + i * kLineBytes, row + i, k, planes...);
  } else {
    load_box<kToAll>(map, full, to, k, row, planes...);
  }
}

// A tile's rows of an operand, which so many CTAs of the cluster share: each loads a part, into the same slot of all of them.
template <bool kIsMnMajor, uint32_t kRows, uint32_t kSharers, typename... Planes>
DEVICE void load_operand(const ptx::TensorMap* map, uint64_t* full, uint8_t* to, uint32_t k, uint32_t row, Planes... planes) {
  if constexpr (kSharers > 1) {
    constexpr uint32_t kPart = kRows / kSharers;
    const uint32_t first = ptx::cluster_rank() * kPart;
    load_rows<kIsMnMajor, kPart, true>(map, full, to + first * kLineBytes, k, row + first, planes...);
  } else {
    load_rows<kIsMnMajor, kRows>(map, full, to, k, row, planes...);
  }
}
