// Writes zeros as padding after a group.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "work/layout.cuh"

// Writes zeros to a row of D, with all lanes of a warp. A row's address and size are multiples of 16 bytes.
DEVICE void write_zeros(uint8_t* d, uint64_t pitch_bytes, uint32_t row_bytes, uint32_t row) {
  for (uint32_t byte = ptx::lane_index() * 16; byte < row_bytes; byte += 512)
    ptx::st_global_v4_b32(d + row * pitch_bytes + byte, 0, 0, 0, 0);
}

// Warps, each in another CTA, that divide an aligned block of rows: a single warp would take longer than a tile.
constexpr uint32_t kPaddingShares = 4;

// The ids of the rows of an aligned block of at most 128 rows.
struct RowsOfBlock {
  uint32_t ids[kPaddingShares];

  DEVICE void load(const Groups& g, uint32_t first, uint32_t end) {
#pragma unroll
    for (uint32_t i = 0; i < kPaddingShares; ++i) {
      const uint32_t row = first + i * 32 + ptx::lane_index();
      ids[i] = row < end ? id_of_row(g, row) : ~0u;
    }
  }

  // Returns a bit for each row of one share, 1 if the row has a group; `any` tells whether a row of the block has one.
  DEVICE uint32_t used(const Groups& g, uint32_t share, bool& any) const {
    uint32_t of_share = 0;
    any = false;
#pragma unroll
    for (uint32_t i = 0; i < kPaddingShares; ++i) {
      const uint32_t used = ptx::ballot_sync(ids[i] < g.count);
      any |= used != 0;
      if (i == share) of_share = used;
    }
    return of_share;
  }
};

// Writes zeros to rows without a group that share an aligned block of rows with a row of a group. One warp of each CTA
// calls this; its lanes have synchronized since they last read the window.
DEVICE void zero_padding(const Groups& g, uint32_t* window, uint8_t* d, uint64_t pitch_bytes, uint32_t row_bytes) {
  if constexpr (kGroups == kGroupCounts) return;
  const uint32_t blocks = kGroups == kGroupEnds ? g.count : ceil_div(g.rows, g.alignment), units = blocks * kPaddingShares;
  // The shares of a CTA are consecutive, because groups often begin at regular distances.
  const uint32_t each = ceil_div(units, ptx::grid_size()), first_unit = ptx::block_index() * each;
  const uint32_t end_unit = first_unit + each < units ? first_unit + each : units;
  const auto end_of_block = [&](uint32_t unit) {
    const uint32_t end = (unit / kPaddingShares + 1) * g.alignment;
    return end < g.rows ? end : g.rows;
  };
  if constexpr (kGroups == kGroupEnds) {
    for (uint32_t unit = first_unit; unit < end_unit; ++unit) {
      // A group without rows ends where an earlier group ends, or where no padding is needed.
      const uint32_t end = end_of_group(g, unit / kPaddingShares), padded = ceil_div(end, g.alignment) * g.alignment;
      for (uint32_t row = end + unit % kPaddingShares; row < padded && row < g.rows; row += kPaddingShares)
        write_zeros(d, pitch_bytes, row_bytes, row);
    }
  } else {
    for (uint32_t i = ptx::lane_index() * 4; i < kWindowRows; i += 128) ptx::st_shared_v4_b32(&window[i], 0, 0, 0, 0);
    ptx::fence_proxy_async_shared();
    ptx::syncwarp();
    RowsOfBlock coming;  // loaded while zeros of the previous block are written
    coming.load(g, first_unit / kPaddingShares * g.alignment, end_of_block(first_unit));
    for (uint32_t unit = first_unit; unit < end_unit; ++unit) {
      const RowsOfBlock rows = coming;
      coming.load(g, (unit + 1) / kPaddingShares * g.alignment, end_of_block(unit + 1));
      bool any;
      const uint32_t share = unit % kPaddingShares, used = rows.used(g, share, any);
      const uint32_t row = unit / kPaddingShares * g.alignment + share * 32 + ptx::lane_index();
      if (!any || used >> ptx::lane_index() & 1 || row >= end_of_block(unit)) continue;
#pragma unroll 1
      for (uint32_t byte = 0; byte < row_bytes; byte += kWindowRows * 4)
        ptx::bulk_store(d + row * pitch_bytes + byte, window, row_bytes - byte < kWindowRows * 4 ? row_bytes - byte : kWindowRows * 4);
    }
    ptx::tma_store_commit();
    ptx::tma_store_wait_read<0>();
  }
}
