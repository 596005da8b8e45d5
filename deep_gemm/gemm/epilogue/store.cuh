// Stores accumulators to D: registers -> swizzled panels in shared memory -> TMA.
//
// Panels rotate through a warpgroup's own buffers, so that no warpgroup waits for another. A warpgroup reuses a buffer
// only after TMA has read it.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"
#include WORK

struct OutputStorage {
  alignas(1024) uint8_t buffers[kNumMathWarpgroups * kNumStoreBuffers * kStoreBufferBytes];
};

struct OutputBarriers {
  DEVICE void init() {}
};

DEVICE void prefetch_output_map(const Params& p) { ptx::prefetch_tensormap(&p.map_d); }

// If a tile will be added to D, prefetches one k-block's share of that part of D into the L2: one panel, or more if
// there are few k-blocks. So D arrives while the tile is multiplied, not when all CTAs store at once. Only the last
// k-blocks prefetch: D would displace operands in the L2 for longer if it came earlier.
DEVICE void prefetch_d(const Params& p, const Tile& tile, uint32_t k_block, uint32_t num_k_blocks) {
  if constexpr (!kAddsToD) return;
  const Destination to(p, tile, 0);
  constexpr uint32_t kAlongN = kBlockN / kPanelColumns, kPanels = kBlockM / 64 * kAlongN;
  const uint32_t share = ceil_div(kPanels, num_k_blocks), first_k_block = num_k_blocks - ceil_div(kPanels, share);
  if (k_block < first_k_block) return;
  const uint32_t first = (k_block - first_k_block) * share;
  for (uint32_t panel = first; panel < first + share && panel < kPanels; ++panel) {
    const uint32_t row = tile.row_m + panel / kAlongN * 64, column = tile.row_n + panel % kAlongN * kPanelColumns;
    to.prefetch(column, row);
  }
}

// Adds C to one unit's accumulators, in FP32. Rows past D's last row stay unchanged. Accumulators past D's last column
// get some value of the same row; any value will do, as TMA does not store them.
DEVICE void add_c(float (&total)[kUnitN / 2], const uint8_t* c, uint64_t pitch, uint32_t row, uint32_t column,
                  uint32_t m, uint32_t n, uint32_t lane) {
  const uint32_t first_column = column + lane % 4 * 2;
  const uint32_t columns_left = first_column < n ? n - first_column : 0;  // n is even: a pair is inside or outside
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t row_m = row + half * 8 + lane / 4;
    if (row_m >= m || columns_left == 0) continue;
    const uint8_t* first_pair = c + (row_m * pitch + first_column) * kCBytes;
#pragma unroll
    for (uint32_t i = 0; i < kUnitN / 8; ++i) {
      // Selects an address instead of branching around each load: loads stay together, and compile faster.
      const uint8_t* at = first_pair + (i * 8 < columns_left ? i * 8 * kCBytes : 0);
      const ptx::Float2 pair = kCIsFp32 ? ptx::ld_global_v2_f32(at) : ptx::unpack_bf16(ptx::ld_global_b32(at));
      total[i * 4 + half * 2] += pair.x;
      total[i * 4 + half * 2 + 1] += pair.y;
    }
  }
}

// Stores a warpgroup's tiles through panels. stored.cuh uses it unchanged; other epilogues change the totals first.
struct PanelOutput {
  uint8_t* buffers;  // the warpgroup's own
  uint32_t warpgroup, next_buffer = 0;

  DEVICE PanelOutput(OutputStorage& storage, OutputBarriers&, uint32_t warpgroup_)
      : buffers(storage.buffers + warpgroup_ * kNumStoreBuffers * kStoreBufferBytes), warpgroup(warpgroup_) {}

  DEVICE void expect(const Params&, const Tile&) {}

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const Tile& tile, float (&total)[kUnits][kUnitN / 2]) {
    const uint32_t row_m = tile.row_m + warpgroup * 64;
    if constexpr (kWithC) {
      const uint8_t* c = c_of(p, tile);
#pragma unroll  // `total` stays in registers only while its indices are known at compile time
      for (uint32_t unit = 0; unit < kUnits; ++unit)
        add_c(total[unit], c, p.c_pitch, row_m + row_of_unit(unit) + ptx::warp_index() % 4 * 16,
              tile.row_n + column_of_unit(unit), p.m, p.n, ptx::lane_index());
    }
    const uint32_t warp_of_four = ptx::warp_index() % 4, lane = ptx::lane_index();
    const bool is_storing_thread = warp_of_four == 0 && lane == 0;
    const uint32_t named_barrier = 1 + warpgroup;  // barrier 0 is the whole block's
    constexpr uint32_t kPanels = kUnits * kPanelsPerUnit, kAtOnce = kPanels < kPanelsPerStore ? kPanels : kPanelsPerStore;
    static_assert(kPanels % kAtOnce == 0, "panels must fill a tile");
    const Destination to(p, tile, row_m + row_of_unit(kUnits - 1) + 64);
#pragma unroll
    for (uint32_t first = 0; first < kPanels; first += kAtOnce) {
      uint8_t* panels = buffers + next_buffer * kStoreBufferBytes;
      // The store that last used this buffer was kNumStoreBuffers stores ago; TMA must have read the buffer.
      if (is_storing_thread) ptx::tma_store_wait_read<kNumStoreBuffers - 1>();
      ptx::bar_sync(named_barrier, 128);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t unit = (first + i) / kPanelsPerUnit, column = (first + i) % kPanelsPerUnit * kPanelColumns;
        write_panel(panels + i * kPanelBytes, to.span, &total[unit][column / 2], warp_of_four, lane);
      }
      ptx::fence_proxy_async_shared();  // every thread that wrote must fence before TMA reads
      ptx::bar_sync(named_barrier, 128);
      if (is_storing_thread) {
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const uint32_t unit = (first + i) / kPanelsPerUnit, column = (first + i) % kPanelsPerUnit * kPanelColumns;
          const uint32_t d_column = (tile.row_n + column_of_unit(unit)) / kColumnsOfValue + column, d_row = row_m + row_of_unit(unit);
          to.store(panels + i * kPanelBytes, d_column, d_row);
        }
        ptx::tma_store_commit();
      }
      next_buffer = next_buffer + 1 == kNumStoreBuffers ? 0 : next_buffer + 1;
    }
  }

  // Returns the warpgroup's buffers once TMA has read them. Its threads may use them until store_tile, whose first
  // barrier keeps a thread from overwriting data that another has yet to read.
  DEVICE uint8_t* free_buffers() const {
    if (ptx::warp_index() % 4 == 0 && ptx::lane_index() == 0) ptx::tma_store_wait_read<0>();
    ptx::bar_sync(1 + warpgroup, 128);
    return buffers;
  }

  // Keeps the warpgroup running while TMA reads its shared memory.
  DEVICE void finish() {
    if (ptx::warp_index() % 4 == 0 && ptx::lane_index() == 0) ptx::tma_store_wait_read<0>();
  }
};

DEVICE void leave() {}
