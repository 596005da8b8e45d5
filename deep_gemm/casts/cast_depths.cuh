// Casts operands of products along groups of rows; only the GPU knows where groups end. Stores each group's transposed values
// [k, depth], with a scale for each column and 128 of the group's rows. A group's depth is its number of rows, aligned to kDepthMultiple, and
// groups follow each other without gaps: values from k * (the depths before) on, scales from the blocks of 128 rows before.
//
// A CTA takes a 128x128 tile of a group, which cast/tile.cuh casts. It reads all ends to find its group, so the host
// need not wait for them: it launches a CTA for each tile that the groups could have.
#pragma once
#include "cast/tile.cuh"
#include "lanes.cuh"

struct DepthsCastParams {
  const uint8_t* x;             // rows, or tokens; gate and up side by side
  const uint8_t* ds;            // the gradient of the activation, without the weights of rows
  const int32_t* ends;          // of groups
  const int32_t* token_of;      // of rows
  const float* row_weights;     // of rows
  uint8_t *columns, *column_scales;
  uint8_t *values, *scales;     // of rows as they lie
  uint8_t *activated, *activated_scales;  // columns of the activation
  float* sums;                  // [tiles of the activation's columns, rows]
  uint32_t x_pitch, ds_pitch;   // in bytes
  uint32_t stride_of_block, activated_stride_of_block, scales_stride_k;  // of scales, whose rows follow each other
  uint32_t rows, k;             // most rows that all groups may have; columns of x
  uint32_t room, num_groups;    // the depths that outputs have room for
  uint32_t tiles, reciprocal;   // tiles of columns: see BlockOfRows
  uint32_t gradient_tiles;      // the first of them, which are the gradient's, not the activation's
  float limit;                  // gate counts as at most this, up as within +-this
};
#include "depths_cast_params_layout.cuh"  // asserts that it lies as core/params.py packs it

constexpr uint32_t kDepthMultiple = 16;

struct GroupStorage {
  alignas(16) ptx::Uint4 group;  // first row, rows, the depths before, the tile's first row
  uint32_t warps[kNumWarps][2];
};

// The group of a tile.
struct Group {
  uint32_t first_row, rows, first_depth;
  uint32_t row;    // the tile's first, counted from the group's
  uint32_t block;  // the number of these 128 rows among those blocks of all groups

  DEVICE uint32_t depth() const { return ceil_div(rows, kDepthMultiple) * kDepthMultiple; }
  DEVICE uint32_t first_block() const { return block - row / kBlock; }
};

DEVICE uint32_t end_of(const DepthsCastParams& p, uint32_t group) {
  const int32_t end = ptx::ld_global_i32(p.ends + group);
  return end < 0 ? 0 : static_cast<uint32_t>(end) < p.rows ? end : p.rows;
}

// Finds a tile's group, by all threads of the CTA. Gives a group without rows if there is no such tile.
DEVICE Group group_of(const DepthsCastParams& p, GroupStorage& shared, uint32_t tile) {
  const uint32_t thread = ptx::thread_index(), lane = ptx::lane_index();
  if (thread == 0) ptx::st_shared_v4_b32(&shared.group, 0, 0, 0, 0);
  uint32_t tiles_before = 0, depth_before = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < p.num_groups; first += kNumThreads) {
    const uint32_t group = first + thread;
    uint32_t first_row = 0, rows = 0;
    if (group < p.num_groups) {
      const uint32_t end = end_of(p, group);
      first_row = group == 0 ? 0 : end_of(p, group - 1);
      rows = end > first_row ? end - first_row : 0;
    }
    const uint32_t own_tiles = ceil_div(rows, kBlock), own_depth = ceil_div(rows, kDepthMultiple) * kDepthMultiple;
    uint32_t tiles = sum_up_to_lane(own_tiles, lane), depth = sum_up_to_lane(own_depth, lane);
    if (lane == 31) ptx::st_shared_v2_b32(shared.warps[thread / 32], tiles, depth);
    ptx::syncthreads();
    tiles += tiles_before - own_tiles, depth += depth_before - own_depth;
#pragma unroll
    for (uint32_t warp = 0; warp < kNumWarps; ++warp) {
      const ptx::Uint2 of_warp = ptx::ld_shared_v2_b32(shared.warps[warp]);
      tiles += warp < thread / 32 ? of_warp.x : 0, depth += warp < thread / 32 ? of_warp.y : 0;
      tiles_before += of_warp.x, depth_before += of_warp.y;
    }
    const bool has_room = depth + own_depth <= p.room;  // whatever the ends are, nothing leads outside of the outputs
    if (tile >= tiles && tile - tiles < own_tiles && has_room)
      ptx::st_shared_v4_b32(&shared.group, first_row, rows, depth, (tile - tiles) * kBlock);
    ptx::syncthreads();
  }
  const ptx::Uint4 found = ptx::ld_shared_v4_b32(&shared.group);
  return {found.x, found.y, found.z, found.w, tile};
}

// The tile of a group with this first column.
DEVICE Tile tile_of(const Group& group, uint32_t column) {
  Tile tile(BlockOfRows(0, 1, 0xffffffff));
  tile.row = group.row, tile.column = column;
  return tile;
}

// Where the transposed values of `k` columns of a group go.
DEVICE TileCastParams target_of(const Group& group, uint8_t* columns, uint8_t* scales, uint32_t stride_of_block, uint32_t k) {
  TileCastParams target = {};
  target.columns = columns + uint64_t{group.first_depth} * k;
  target.columns_pitch = group.depth();
  target.column_scales = scales + uint64_t{group.first_block()} * stride_of_block;
  target.column_scales_stride_m = stride_of_block, target.column_scales_stride_k = 4;
  target.m = group.rows, target.k = k;
  return target;
}

// Where the gradient of gate and up of a group goes.
DEVICE TileCastParams gradient_target_of(const DepthsCastParams& p, const Group& group) {
  TileCastParams target = target_of(group, p.columns, p.column_scales, p.stride_of_block, p.k);
  target.values = p.values + uint64_t{group.first_row} * p.k, target.values_pitch = p.k;
  target.scales = p.scales + uint64_t{group.first_row} * 4, target.scales_stride_m = 4, target.scales_stride_k = p.scales_stride_k;
  return target;
}

DEVICE float weight_of(const DepthsCastParams& p, const Group& group, uint32_t row) {
  return row < group.rows ? ptx::ld_global_f32(p.row_weights + group.first_row + row) : 0.f;
}

// Writes `compute(e)` for each element `e`, rounded to the type of x.
template <typename Compute>
DEVICE void store_elements(Piece& piece, Compute compute) {
#pragma unroll
  for (uint32_t word = 0; word < kWords; ++word) {
    const float first = compute(word * kElementsOfWord);
    if constexpr (kInputIsFp32)
      piece.words[word] = ptx::bits_of(first);
    else
      piece.words[word] = ptx::pack_bf16(first, compute(word * 2 + 1));
  }
}

#include SOURCE  // cast_tile_of: casts a tile; Storage: the shared memory that it needs

struct SharedStorage {
  Storage tile;
  GroupStorage group;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "DepthsCastConfig.shared_bytes and SharedStorage differ");

KERNEL(kNumThreads, kCtasPerSm) cast_depths(GRID_CONSTANT DepthsCastParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const BlockOfRows at(ptx::block_index(), p.tiles, p.reciprocal);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  const Group group = group_of(p, shared.group, at.row);
  if (group.rows != 0) cast_tile_of(p, shared.tile, group, at.block);
}
