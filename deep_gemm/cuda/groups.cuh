// Products of several groups of rows, each with its own B. Only the GPU knows which rows belong to which group:
//
//   kGroupIds      rows of A [m, k] and D [m, n]; the layout holds a group's number for each row, -1: no group
//   kGroupEnds     the same rows; it holds for each group where its rows end; they begin at the aligned end of those before
//   kGroupCounts   the first rows of each group's own A [rows, k] and D [rows, n]; it holds how many
//
// One warp of each CTA reads the layout, stretch by stretch, and deals the CTA's tiles out to the thread that loads and to
// the math warps, through a queue. It is ahead of them, so that a search through thousands of rows without a group
// delays nobody. Two more warps write the zeros that callers expect in the padding behind a group.
#pragma once
#include "config.cuh"
#include "k_groups.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

constexpr uint32_t kNoGroups = 0, kGroupIds = 1, kGroupEnds = 2, kGroupCounts = 3;
constexpr bool kRowsAreStacked = kGroups == kGroupIds || kGroups == kGroupEnds;

struct Groups {
  union {
    const int32_t* layout;
    const KGroup* k_groups;  // where groups are along k: see k_scheduler.cuh
  };
  union {
    uint64_t sfb_stride;  // from one group's scales of B to the next, in elements
    uint64_t c_stride;    // where groups are along k, from one group's C to the next
  };
  uint32_t count;       // of groups
  uint32_t rows;        // of A and D, with kGroupCounts of each group's
  uint32_t alignment;   // of where rows begin with kGroupEnds, and of blocks whose padding is zeroed
  uint32_t zeroes_padding;
};

struct Tile {
  uint32_t row_m;  // first row of D
  uint32_t row_n;  // first column of D, a row of B
  union {
    uint32_t end_m;         // where the group's rows end
    uint32_t num_k_blocks;  // where groups are along k, the group's
  };
  uint32_t group;
};

// Rows that follow each other and belong to one group. Not necessarily all of them: a search for the end of thousands of
// rows would keep the first tile waiting.
struct Stretch {
  uint32_t first, end, group;
};

// ---- Reading the layout

// The first index from `first` on that fulfils a condition, or `count`. By all lanes of a warp.
template <typename Condition>
DEVICE uint32_t find(uint32_t first, uint32_t count, const Condition& is_found) {
  // Of a lane: as many loads as registers allow are under way at a time, with no branch between them.
  constexpr uint32_t kEach = kGroups == kGroupEnds ? 2 : kProducerRegisters > 64 ? 8 : 4;
  for (; first < count; first += 32 * kEach) {
    bool is_here[kEach];
    uint32_t found = count;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t index = first + i * 32 + ptx::lane_index();
      is_here[i] = is_found(index < count ? index : count - 1);
    }
#pragma unroll
    for (uint32_t i = kEach; i-- > 0;) found = is_here[i] ? first + i * 32 + ptx::lane_index() : found;
    found = ptx::reduce_min_sync(found < count ? found : count);
    if (found < count) return found;
  }
  return count;
}

// What the layout says of a row or a group. Nothing that a caller writes there leads outside of the operands.
DEVICE uint32_t id_of_row(const Groups& g, uint32_t row) {
  return static_cast<uint32_t>(ptx::ld_global_nc_i32(g.layout + row));  // no group, -1, is the largest number
}

DEVICE uint32_t end_of_group(const Groups& g, uint32_t group) {
  const int32_t end = ptx::ld_global_nc_i32(g.layout + group);
  return end < 0 ? 0 : static_cast<uint32_t>(end) < g.rows ? end : g.rows;
}

DEVICE uint32_t start_of_group(const Groups& g, uint32_t group) {
  if constexpr (kGroups == kGroupCounts) return 0;
  const uint32_t end_before = end_of_group(g, group == 0 ? 0 : group - 1);
  return group == 0 ? 0 : ceil_div(end_before, g.alignment) * g.alignment;
}

// The next stretch, of which there is at least one row. `at` is how far the layout has been read: rows or groups.
DEVICE bool next_stretch(const Groups& g, uint32_t& at, Stretch& stretch) {
  if constexpr (kGroups == kGroupIds) {
    stretch.first = find(at, g.rows, [&](uint32_t row) { return id_of_row(g, row) < g.count; });
    if (stretch.first == g.rows) return false;
    stretch.group = id_of_row(g, stretch.first);
    const uint32_t limit = stretch.first + kRasterGroup * kBlockM;
    stretch.end = at = find(stretch.first + 1, limit < g.rows ? limit : g.rows,
                            [&](uint32_t row) { return id_of_row(g, row) != stretch.group; });
  } else {
    const uint32_t group = find(at, g.count, [&](uint32_t i) { return end_of_group(g, i) > start_of_group(g, i); });
    if (group == g.count) return false;
    stretch = {start_of_group(g, group), end_of_group(g, group), group};
    at = group + 1;
  }
  return true;
}

// ---- Dealing out tiles

// One arrival of the warp that deals, and one of each that takes: the loading thread and the math warps.
constexpr uint32_t kTileTakers = 1 + kNumMathWarps;

struct TileQueue {
  alignas(16) Tile tiles[kTileSlots];
  uint64_t full[kTileSlots], empty[kTileSlots];

  DEVICE void init() {
    for (uint32_t slot = 0; slot < kTileSlots; ++slot) {
      ptx::mbarrier_init(&full[slot], 1);
      ptx::mbarrier_init(&empty[slot], kTileTakers);
    }
  }
};

// By a warp. `number` counts the tiles that the queue has seen.
DEVICE void deal(TileQueue& queue, uint32_t& number, const Tile& tile) {
  const uint32_t slot = number % kTileSlots;
  if (ptx::lane_index() == 0) {
    ptx::mbarrier_wait_parity(&queue.empty[slot], (number / kTileSlots & 1) ^ 1);
    ptx::st_shared_v4_b32(&queue.tiles[slot], tile.row_m, tile.row_n, tile.end_m, tile.group);
    ptx::mbarrier_arrive(&queue.full[slot]);
  }
  ptx::syncwarp();
  ++number;
}

constexpr Tile kNoMoreTiles = {0, 0, 0, 0};  // a tile ends behind a row

// By a thread, or a warp: the shuffles show the compiler that all lanes have the same.
template <bool kIsWarp>
DEVICE bool take(TileQueue& queue, uint32_t& number, Tile& tile) {
  const uint32_t slot = number % kTileSlots;
  ptx::mbarrier_wait_parity(&queue.full[slot], number / kTileSlots & 1);
  const ptx::Uint4 dealt = ptx::ld_shared_v4_b32(&queue.tiles[slot]);
  tile = {dealt.x, dealt.y, dealt.z, dealt.w};
  if constexpr (kIsWarp)
    tile = {ptx::shfl_sync(tile.row_m, 0), ptx::shfl_sync(tile.row_n, 0), ptx::shfl_sync(tile.end_m, 0),
            ptx::shfl_sync(tile.group, 0)};
  ptx::mbarrier_arrive_after(&queue.empty[slot], dealt.x, !kIsWarp || ptx::lane_index() == 0);
  ++number;
  return tile.end_m != 0;
}

// ---- Rows that are not the group's
//
// A box of a tensor map must not reach past the end of its group's rows, neither to write nor to load. A and D are
// described with one dimension more: `height` rows, the box's, and as many places where they may begin, one pitch apart.
//
//   address of box row i = base + (i_first + i + place) * pitch      i_first + i < height is the hardware's bound
//
// The base lies `height` rows before the tensor. So the box that begins in place row + r, with its first row at height -
// r, has r rows from `row` on, and the rest of it is out of bounds: it loads as zeros and is not stored.
struct ClippedBox {
  uint32_t first, place;

  DEVICE ClippedBox(uint32_t row, uint32_t end, uint32_t height) {
    const uint32_t rows = row >= end ? 0 : end - row < height ? end - row : height;
    first = height - rows, place = row + rows;
  }
};

// Which of the row-grouped matrices: with kGroupCounts each group has its own.
DEVICE uint32_t plane_of(const Tile& tile) { return kGroups == kGroupCounts ? tile.group : 0; }

// Scales that are loaded ahead of a tile's own: TMA loads from a multiple of 16 bytes on, and a group begins at any row.
DEVICE uint32_t skipped_scales(const Tile& tile) { return kRowsAreStacked ? tile.row_m % 4 : 0; }

// ---- Padding

// Writes zeros to a row of D, by all lanes of a warp. Rows are whole 16 bytes, at multiples of 16.
DEVICE void write_zeros(uint8_t* d, uint64_t pitch_bytes, uint32_t row_bytes, uint32_t row) {
  for (uint32_t byte = ptx::lane_index() * 16; byte < row_bytes; byte += 512)
    ptx::st_global_v4_b32(d + row * pitch_bytes + byte, 0, 0, 0, 0);
}

// Zeros for the rows without a group that share an aligned block of rows with one that has a group. This is warp `warp`
// of `warps`, all CTAs counted.
DEVICE void zero_padding(const Groups& g, uint8_t* d, uint64_t pitch_bytes, uint32_t row_bytes, uint32_t warp,
                         uint32_t warps) {
  if constexpr (kGroups == kGroupEnds) {
    for (uint32_t group = warp; group < g.count; group += warps) {
      // A group without rows ends where one before it does, or where none needs padding.
      const uint32_t end = end_of_group(g, group), padded = ceil_div(end, g.alignment) * g.alignment;
      for (uint32_t row = end; row < padded && row < g.rows; ++row) write_zeros(d, pitch_bytes, row_bytes, row);
    }
  }
  if constexpr (kGroups == kGroupIds) {
    for (uint32_t first = warp * g.alignment; first < g.rows; first += warps * g.alignment) {
      const uint32_t end = first + g.alignment < g.rows ? first + g.alignment : g.rows;
      if (find(first, end, [&](uint32_t row) { return id_of_row(g, row) < g.count; }) == end) continue;
      for (uint32_t row = first; row < end; ++row)
        if (id_of_row(g, row) >= g.count) write_zeros(d, pitch_bytes, row_bytes, row);
    }
  }
}
