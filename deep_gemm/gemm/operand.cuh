// Loads operands into the slots of the ring, with either major and any number of dimensions.
//
//   K-major    rows of 128 bytes along k: one box of all rows
//   MN-major   boxes of 64 rows (of A or B), 128 bytes of these rows for each k of the block; 64 rows further, the next box
//
// In both cases 64 rows fill 64 x 128 bytes of the slot, and TMA writes zeros where a box is outside the operand. (Only
// BF16 is loaded MN-major: WGMMA can transpose no other type.)
#pragma once
#include "config.cuh"
#include "params.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "slot.cuh"

// Loads one box into this CTA's slot, or into the slots of all CTAs of the cluster.
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

// Loads kRows rows from `row` on, one k-block deep from `k` on.
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

// Loads a tile's rows of an operand. If kSharers CTAs of the cluster share them, each loads a part into all slots.
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

// ---- If one map covers all of A, another all of B, and other maps the scales

DEVICE void prefetch_maps(const Product& p) {
  ptx::prefetch_tensormap(&p.map_a);
  ptx::prefetch_tensormap(&p.map_b);
  if constexpr (kHasScales) ptx::prefetch_tensormap(&p.map_sfa);
  if constexpr (kSfbIsPerRow) ptx::prefetch_tensormap(&p.map_sfb);
}

// Boxes of A and its scales have no more rows than A: TMA takes longer to fill an outside row with zeros than to load it.
// Old data after these rows in the slot are multiplied too, but the results are not stored.
DEVICE uint32_t bytes_of_boxes(const Product& p) {
  const uint32_t rows = (!kAIsMnMajor && p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA) * kClusterN;
  const uint32_t scales = kHasScales && kScaleParts == 1 && p.m < kBlockM ? ceil_div(p.m, 4) * 4 : kBlockM;  // TMA loads 16 bytes or more
  return kSlotBytes - (kBlockM - rows) * kLineBytes - (kBlockM - scales) * 4;
}

// Loads a tile. In maps of several planes, the plane is the last coordinate.
template <typename Params, typename Tile>
struct LoadOfBoxes {
  const Params& p;
  const Tile& tile;
  uint32_t slot_bytes;

  DEVICE LoadOfBoxes(const Params& p_, const Tile& tile_) : p(p_), tile(tile_), slot_bytes(bytes_of_boxes(p_)) {}

  template <typename... Planes>
  DEVICE void load_operands(const Slot& slot, uint32_t k, Planes... planes) const {
    load_operand<kAIsMnMajor, kBlockM, kClusterN>(&p.map_a, slot.full, slot.a, k, tile.row_m, planes...);
#pragma unroll
    for (uint32_t row = 0; row < kBlockN; row += kBoxRowsOfB)
      load_operand<kBIsMnMajor, kBoxRowsOfB, kClusterM>(&p.map_b, slot.full_of_b, slot.b + row * kLineBytes, k / kPackedB,
                                                        tile.row_n + row, planes...);
  }

  template <typename... Planes>
  DEVICE void load_scales(const Slot& slot, uint32_t k_block, Planes... planes) const {
    if constexpr (kHasScales)
      load_box<false>(&p.map_sfa, slot.full, slot.scales, tile.row_m, k_block * kScaleParts, planes...);
    if constexpr (kSfbIsPerRow)
      load_box<false>(&p.map_sfb, slot.full, slot.scales + kScaleParts * kScaleRows, tile.row_n, k_block * kScalePartsOfB, planes...);
  }
};
