// Panels: 64 rows x kPanelColumns of a tile in shared memory, as TMA stores them: the box of D's tensor map.
//
// TMA's swizzle spans at most 128 bytes of a panel's row. In FP32, four threads write 32 bytes of a row, and four rows
// at a time: in rows of 128 bytes, two of these threads hit the same banks with any swizzle. In wide rows, of 256
// bytes, none do if n is a multiple of 32, and four do if n is a multiple of only 8 or 4. D's map then has two
// dimensions for columns: spans, and columns of a span.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

constexpr uint32_t kPanelRowBytes = kPanelColumns * kOutputBytes;
constexpr bool kPanelIsWide = kPanelRowBytes == 256;
constexpr uint32_t kPanelBytes = 64 * kPanelRowBytes;
constexpr uint32_t kPanelsPerUnit = kUnitN / kColumnsOfValue / kPanelColumns;
constexpr uint32_t kStoreBufferBytes = kPanelsPerStore * kPanelBytes;
static_assert(kUnitN / kColumnsOfValue % kPanelColumns == 0, "panels must fill what a unit has of D");
static_assert(kPanelRowBytes == 32 || kPanelRowBytes == 64 || kPanelRowBytes == 128 || kPanelIsWide,
              "a swizzle must span a panel row, or a part of a wide one");

// The swizzle's span: a panel's row, or in a wide row 4, 8, 16 or 32 columns, the largest number that divides n,
// so that each span is wholly inside or outside D. (n is a multiple of 4.)
struct Span {
  uint32_t log2_columns;  // of a span's columns, in wide rows

  DEVICE explicit Span(uint32_t n) : log2_columns(n & 4 ? 2 : n & 8 ? 3 : n & 16 ? 4 : 5) {}

  DEVICE uint32_t bytes() const { return kPanelIsWide ? kOutputBytes << log2_columns : kPanelRowBytes; }

  // The index of the span of D that begins at a column, if panels are wide.
  DEVICE uint32_t at_column(uint32_t column) const { return column >> log2_columns; }

  // The offset where TMA expects the 16 bytes at (row, byte) of a panel: their index in the span, XOR the index of
  // their 128 bytes in the panel, modulo the span's chunks. (PTX ISA, "Swizzling Modes".)
  DEVICE uint32_t swizzled(uint32_t row, uint32_t byte) const {
    const uint32_t offset = row * kPanelRowBytes + byte;
    return offset ^ (offset >> 3 & (bytes() - 16));
  }
};

// Writes one warp's 16 rows of a panel. `values` are the unit's accumulators from the panel's first column on.
DEVICE void write_panel(uint8_t* panel, const Span& span, const float* values, uint32_t warp_of_four, uint32_t lane) {
  if constexpr (kOutputIsFp32) {
#pragma unroll
    for (uint32_t column = 0; column < kPanelColumns; column += 8) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = warp_of_four * 16 + half * 8 + lane / 4;
        const float* pair = values + column / 2 + half * 2;
        ptx::st_shared_v2_f32(panel + span.swizzled(row, (column + lane % 4 * 2) * 4), pair[0], pair[1]);
      }
    }
  } else {
    // stmatrix reads the address of row i of its four 8x8 matrices from lane i: rows 0-7 and 8-15 of columns 0-7, then
    // of columns 8-15.
    const uint32_t row = warp_of_four * 16 + lane % 16;
#pragma unroll
    for (uint32_t column = 0; column < kPanelColumns; column += 16) {
      const float* v = values + column / 2;
      ptx::stmatrix_x4(panel + span.swizzled(row, (column + lane / 16 * 8) * 2), ptx::pack_bf16(v[0], v[1]),
                       ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
    }
  }
}

// Stores a panel, or adds it to D, at coordinates of D's map.
DEVICE void store_panel(const ptx::TensorMap* map_d, const uint8_t* panel, uint32_t c0, uint32_t c1) {
  if constexpr (kAddsToD)
    ptx::tma_reduce_add_2d(map_d, panel, c0, c1);
  else
    ptx::tma_store_2d(map_d, panel, c0, c1);
}
DEVICE void store_panel(const ptx::TensorMap* map_d, const uint8_t* panel, uint32_t c0, uint32_t c1, uint32_t c2) {
  if constexpr (kAddsToD)
    ptx::tma_reduce_add_3d(map_d, panel, c0, c1, c2);
  else
    ptx::tma_store_3d(map_d, panel, c0, c1, c2);
}
DEVICE void store_panel(const ptx::TensorMap* map_d, const uint8_t* panel, uint32_t c0, uint32_t c1, uint32_t c2,
                        uint32_t c3) {
  if constexpr (kAddsToD)
    ptx::tma_reduce_add_4d(map_d, panel, c0, c1, c2, c3);
  else
    ptx::tma_store_4d(map_d, panel, c0, c1, c2, c3);
}
