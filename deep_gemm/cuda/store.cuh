// From accumulators to D: registers -> swizzled panels in shared memory -> TMA.
//
// A warpgroup stores its rows in panels of 64 rows x kPanelColumns, the box of D's tensor map. Panels rotate through the
// warpgroup's own buffers, so that no warpgroup waits for another, and a buffer is written again only once TMA has read it.
//
// Rows of a panel are what TMA's swizzle spans, at most 128 bytes, but for wide ones. In FP32 four threads write 32 bytes of a
// row, and four neighbouring rows at a time: in rows of 128 bytes, whatever the swizzle, two of these meet in the same
// banks. In rows of 256 bytes, wide ones, none do where n is a multiple of 32; where n is a multiple of 8 or 4 alone, four
// do. D's map then has its columns in two dimensions: spans, and columns of a span.
#pragma once
#include "config.cuh"
#include "groups.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

constexpr uint32_t kOutputBytes = kOutputIsFp32 ? 4 : 2;
constexpr uint32_t kPanelRowBytes = kPanelColumns * kOutputBytes;
constexpr bool kPanelIsWide = kPanelRowBytes == 256;
constexpr uint32_t kPanelBytes = 64 * kPanelRowBytes;
constexpr uint32_t kPanelsPerUnit = kUnitN / kPanelColumns;
constexpr uint32_t kStoreBufferBytes = kPanelsPerStore * kPanelBytes;
static_assert(kUnitN % kPanelColumns == 0, "panels must fill a unit");
static_assert(kPanelRowBytes == 32 || kPanelRowBytes == 64 || kPanelRowBytes == 128 || kPanelIsWide,
              "a swizzle must span a panel row, or a part of a wide one");

// The swizzle's span: a panel's row, or, where it is wide, as many columns as are a power of two, at most 32, of which n is a
// multiple, so that no span is only partly inside of D. (n is a multiple of 4.)
struct Span {
  uint32_t log2_columns;  // of wide rows

  DEVICE explicit Span(uint32_t n) : log2_columns(n & 4 ? 2 : n & 8 ? 3 : n & 16 ? 4 : 5) {}

  DEVICE uint32_t bytes() const { return kPanelIsWide ? kOutputBytes << log2_columns : kPanelRowBytes; }

  // Which span of D, where panels are wide, begins at a column.
  DEVICE uint32_t at_column(uint32_t column) const { return column >> log2_columns; }

  // Where TMA expects the 16 bytes at (row, byte) of a panel: their index in the span, XOR the index of the 128 bytes that
  // they are in, modulo the span's chunks. (PTX ISA, "Swizzling Modes".)
  DEVICE uint32_t swizzled(uint32_t row, uint32_t byte) const {
    const uint32_t offset = row * kPanelRowBytes + byte;
    return offset ^ (offset >> 3 & (bytes() - 16));
  }
};

// One warp's 16 rows of a panel. `values` are the unit's accumulators from the panel's first column on.
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
    // stmatrix takes the address of row i of its four 8x8 matrices from lane i: rows 0-7 and 8-15 of columns 0-7, then
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

// Asks the L2 for a k-block's share of the D to which a tile is going to be added: a panel, or more where k-blocks are few.
// So D comes while the tile is multiplied, and not when all CTAs store at once. It is asked for with the last k-blocks: what
// has come sooner takes the place of operands in the L2 for longer (2% at 16 k-blocks, an H200).
DEVICE void prefetch_d(const ptx::TensorMap* map_d, const Span& span, const Tile& tile, uint32_t k_block,
                       uint32_t num_k_blocks) {
  constexpr uint32_t kAlongN = kBlockN / kPanelColumns, kPanels = kBlockM / 64 * kAlongN;
  const uint32_t share = ceil_div(kPanels, num_k_blocks), first_k_block = num_k_blocks - ceil_div(kPanels, share);
  if (k_block < first_k_block) return;
  const uint32_t first = (k_block - first_k_block) * share;
  for (uint32_t panel = first; panel < first + share && panel < kPanels; ++panel) {
    const uint32_t row = tile.row_m + panel / kAlongN * 64, column = tile.row_n + panel % kAlongN * kPanelColumns;
    if constexpr (kIsKGrouped && kPanelIsWide)
      ptx::tma_prefetch_4d(map_d, 0, span.at_column(column), row, tile.group);
    else if constexpr (kIsKGrouped)
      ptx::tma_prefetch_3d(map_d, column, row, tile.group);
    else if constexpr (kPanelIsWide)
      ptx::tma_prefetch_3d(map_d, 0, span.at_column(column), row);
    else
      ptx::tma_prefetch_2d(map_d, column, row);
  }
}

// Stores, or adds to D, a panel whose rows are in no groups.
DEVICE void store_panel(const ptx::TensorMap* map_d, const Span& span, const uint8_t* panel, uint32_t column, uint32_t row,
                        uint32_t group) {
  const uint32_t span_of_d = span.at_column(column);
  if constexpr (kIsKGrouped && kPanelIsWide && kAddsToD)
    ptx::tma_reduce_add_4d(map_d, panel, 0, span_of_d, row, group);
  else if constexpr (kIsKGrouped && kPanelIsWide)
    ptx::tma_store_4d(map_d, panel, 0, span_of_d, row, group);
  else if constexpr (kIsKGrouped && kAddsToD)
    ptx::tma_reduce_add_3d(map_d, panel, column, row, group);
  else if constexpr (kIsKGrouped)
    ptx::tma_store_3d(map_d, panel, column, row, group);
  else if constexpr (kPanelIsWide && kAddsToD)
    ptx::tma_reduce_add_3d(map_d, panel, 0, span_of_d, row);
  else if constexpr (kPanelIsWide)
    ptx::tma_store_3d(map_d, panel, 0, span_of_d, row);
  else if constexpr (kAddsToD)
    ptx::tma_reduce_add_2d(map_d, panel, column, row);
  else
    ptx::tma_store_2d(map_d, panel, column, row);
}

// C at the places of one unit's accumulators, added in FP32. Rows of D that do not exist are left alone; accumulators
// past its last column get some value of the same row, which is as good as any: TMA does not store them.
DEVICE void add_c(float (&total)[kUnitN / 2], const uint8_t* c, uint64_t pitch, uint32_t row, uint32_t column,
                  uint32_t m, uint32_t n, uint32_t lane) {
  const uint32_t first_column = column + lane % 4 * 2;
  const uint32_t columns_left = first_column < n ? n - first_column : 0;  // n is even: a pair is inside or outside
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t row_m = row + half * 8 + lane / 4;
    if (row_m >= m || columns_left == 0) continue;
    const uint8_t* first_pair = c + (row_m * pitch + first_column) * kOutputBytes;
#pragma unroll
    for (uint32_t i = 0; i < kUnitN / 8; ++i) {
      // A choice of address, not a branch around each load: loads stay together, and compile faster.
      const uint8_t* at = first_pair + (i * 8 < columns_left ? i * 8 * kOutputBytes : 0);
      const ptx::Float2 pair = kOutputIsFp32 ? ptx::ld_global_v2_f32(at) : ptx::unpack_bf16(ptx::ld_global_b32(at));
      total[i * 4 + half * 2] += pair.x;
      total[i * 4 + half * 2 + 1] += pair.y;
    }
  }
}

// One 16 x 8 chunk of a tile, summed over the CTAs that split k, from a warp's registers to D, C added.
DEVICE void store_chunk(uint8_t* d, uint64_t d_pitch, const uint8_t* c, uint64_t c_pitch, const ptx::Float4& sum,
                        uint32_t row, uint32_t column, uint32_t m, uint32_t n, uint32_t lane) {
  const uint32_t first_column = column + lane % 4 * 2;
  if (first_column >= n) return;  // n is even: a pair is inside or outside
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t row_m = row + half * 8 + lane / 4;
    if (row_m >= m) continue;
    ptx::Float2 pair = half == 0 ? ptx::Float2{sum.x, sum.y} : ptx::Float2{sum.z, sum.w};
    if constexpr (kWithC) {
      const uint8_t* from = c + (row_m * c_pitch + first_column) * kOutputBytes;
      const ptx::Float2 addend = kOutputIsFp32 ? ptx::ld_global_v2_f32(from) : ptx::unpack_bf16(ptx::ld_global_b32(from));
      pair.x += addend.x;
      pair.y += addend.y;
    }
    uint8_t* to = d + (row_m * d_pitch + first_column) * kOutputBytes;
    if constexpr (kOutputIsFp32)
      ptx::st_global_v2_f32(to, pair.x, pair.y);
    else
      ptx::st_global_b32(to, ptx::pack_bf16(pair.x, pair.y));
  }
}

// All of a warpgroup's rows of a tile, from `row_m` on. `buffer` is the warpgroup's next store buffer and carries over to the next tile.
template <uint32_t kUnits>
DEVICE void store_tile(const ptx::TensorMap* map_d, const ptx::TensorMap* map_whole_d, const Span& span, uint8_t* buffers,
                       uint32_t& buffer, const float (&total)[kUnits][kUnitN / 2], const Tile& tile, uint32_t row_m,
                       uint32_t warpgroup) {
  const uint32_t warp_of_four = ptx::warp_index() % 4, lane = ptx::lane_index();
  const bool is_storing_thread = warp_of_four == 0 && lane == 0;
  const uint32_t named_barrier = 1 + warpgroup;  // 0 is that of the whole block
  constexpr uint32_t kPanels = kUnits * kPanelsPerUnit, kAtOnce = kPanels < kPanelsPerStore ? kPanels : kPanelsPerStore;
  static_assert(kPanels % kAtOnce == 0, "panels must fill a tile");
  constexpr uint32_t kUnitsAlongM = ceil_div(kUnits, kUnitsAlongN);
  const bool is_whole = kHasWholeD && row_m + (kUnitsAlongM - 1) * kUnitStride + 64 <= tile.end_m;
#pragma unroll
  for (uint32_t first = 0; first < kPanels; first += kAtOnce) {
    uint8_t* panels = buffers + buffer * kStoreBufferBytes;
    // The store that last used this buffer is kNumStoreBuffers ago; TMA must have read what it stores.
    if (is_storing_thread) ptx::tma_store_wait_read<kNumStoreBuffers - 1>();
    ptx::bar_sync(named_barrier, 128);
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t unit = (first + i) / kPanelsPerUnit, column = (first + i) % kPanelsPerUnit * kPanelColumns;
      write_panel(panels + i * kPanelBytes, span, &total[unit][column / 2], warp_of_four, lane);
    }
    ptx::fence_proxy_async_shared();  // every writing thread, before TMA reads what it wrote
    ptx::bar_sync(named_barrier, 128);
    if (is_storing_thread) {
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t unit = (first + i) / kPanelsPerUnit, column = (first + i) % kPanelsPerUnit * kPanelColumns;
        const uint32_t d_column = tile.row_n + unit % kUnitsAlongN * kUnitN + column;
        const uint32_t d_row = row_m + unit / kUnitsAlongN * kUnitStride;
        if constexpr (kGroups != kNoGroups) {
          if (is_whole) {
            ptx::tma_store_3d(map_whole_d, panels + i * kPanelBytes, d_column, d_row, plane_of(tile));
            continue;
          }
          const ClippedBox rows(d_row, tile.end_m, 64);
          ptx::tma_store_4d(map_d, panels + i * kPanelBytes, d_column, rows.first, rows.place, plane_of(tile));
        } else {
          store_panel(map_d, span, panels + i * kPanelBytes, d_column, d_row, tile.group);
        }
      }
      ptx::tma_store_commit();
    }
    buffer = buffer + 1 == kNumStoreBuffers ? 0 : buffer + 1;
  }
}
