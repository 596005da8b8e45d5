// Zeros for the padding behind a group.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "work/layout.cuh"

// Writes zeros to a row of D, by all lanes of a warp. Rows are whole 16 bytes, at multiples of 16.
DEVICE void write_zeros(uint8_t* d, uint64_t pitch_bytes, uint32_t row_bytes, uint32_t row) {
  for (uint32_t byte = ptx::lane_index() * 16; byte < row_bytes; byte += 512)
    ptx::st_global_v4_b32(d + row * pitch_bytes + byte, 0, 0, 0, 0);
}

// Zeros for the rows without a group that share an aligned block of rows with one that has a group. This is one warp of
// each CTA.
DEVICE void zero_padding(const Groups& g, uint8_t* d, uint64_t pitch_bytes, uint32_t row_bytes) {
  if constexpr (kGroups == kGroupEnds) {
    for (uint32_t group = ptx::block_index(); group < g.count; group += ptx::grid_size()) {
      // A group without rows ends where one before it does, or where none needs padding.
      const uint32_t end = end_of_group(g, group), padded = ceil_div(end, g.alignment) * g.alignment;
      for (uint32_t row = end; row < padded && row < g.rows; ++row) write_zeros(d, pitch_bytes, row_bytes, row);
    }
  }
  if constexpr (kGroups == kGroupIds) {
    for (uint32_t first = ptx::block_index() * g.alignment; first < g.rows; first += ptx::grid_size() * g.alignment) {
      const uint32_t end = first + g.alignment < g.rows ? first + g.alignment : g.rows;
      const auto has_group = [&](uint32_t row) { return row < end && id_of_row(g, row) < g.count; };
      bool is_used = false;
      for (uint32_t row = first; row < end; row += 32) is_used = has_group(row + ptx::lane_index()) || is_used;
      if (ptx::all_sync(!is_used)) continue;
      for (uint32_t row = first; row < end; row += 32) {
        const uint32_t used = ptx::ballot_sync(has_group(row + ptx::lane_index()));
        for (uint32_t i = 0; i < 32 && row + i < end; ++i)
          if (!(used >> i & 1)) write_zeros(d, pitch_bytes, row_bytes, row + i);
      }
    }
  }
}
