// The layout tells each group's rows. Only the GPU knows it. It is an array in global memory, of one of three kinds:
//
//   kGroupIds      rows of A [m, k] and D [m, n]; the layout holds a group's number for each row, -1: no group
//   kGroupEnds     the same rows; the layout holds each group's end, and the next group begins there, aligned
//   kGroupCounts   the first rows of each group's own A [rows, k] and D [rows, n]; the layout holds their number
//
// Whatever a caller writes there, no access is outside of the operands.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

constexpr uint32_t kGroupIds = 1, kGroupEnds = 2, kGroupCounts = 3;
constexpr bool kRowsAreStacked = kGroups == kGroupIds || kGroups == kGroupEnds;

struct Groups {
  const int32_t* layout;
  uint64_t sfb_stride;  // from one group's scales of B to the next, in elements
  uint32_t count;       // of groups
  uint32_t rows;        // of A and D; with kGroupCounts of each group's
  uint32_t alignment;   // with kGroupEnds of a group's first row; with any kind of a block of rows whose padding is zeroed
  uint32_t zeroes_padding;
};

// Consecutive rows of one group, not necessarily all of its rows: a search for the end of thousands of rows would keep
// the first tile waiting.
struct Stretch {
  uint32_t first, end, group;

  DEVICE uint32_t tiles_m() const { return ceil_div(end - first, kBlockM); }
};

// A tile that was found: its number in the raster of a stretch, and whether it is whole or one half of the columns.
struct FoundTile {
  Stretch stretch;
  uint32_t number;
  bool is_half = false, is_second_half = false;
};

DEVICE uint32_t id_of_row(const Groups& g, uint32_t row) {
  return static_cast<uint32_t>(ptx::ld_global_nc_i32(g.layout + row));  // no group, -1, is the largest number
}

// The same ahead of griddepcontrol's wait, where the decode kernel looks: as cp_async_16 brings it.
DEVICE uint32_t id_in_memory(const Groups& g, uint32_t row) {
  if constexpr (kRunWords > 0) return ptx::ld_relaxed_gpu_b32(g.layout + row);
  return id_of_row(g, row);
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

// Finds stretches in the order of the layout, and counts their tiles. A whole warp does it: an answer of global memory
// takes longer than a k-block, so each request asks for much. All CTAs then find their first tile after one answer, and
// begin together. When some began later, all ran 2% longer, because they shared fewer loads in the L2.
//
// Groups of few rows have low tiles. Their ids are read 32 stretches at a time: one by one a stretch takes 0.27 us, and
// 500 groups keep the math warps waiting for 130 us. High tiles (a group has several) leave no registers for it.
struct Stretches {
  uint32_t* window;  // in shared memory, with kGroupIds: the numbers of the rows from window_first up to window_end
  uint32_t window_first = 0, window_end = 0;
  bool are_many = kGroups != kGroupIds;  // current stretches are many: one for each lane, perhaps without rows
  Stretch stretch{};       // the current one, or this lane's
  uint32_t tiles_end = 0;  // of the current stretches, up to this one's end
  uint32_t tiles_before = 0, tiles = 0;  // of the stretches before, and of the current ones
  uint32_t at = 0;         // how far the layout has been read: rows or groups

  DEVICE explicit Stretches(uint32_t* window_) : window(window_) {}

  // Finds the tile of a number, counted over all stretches; false past the last tile. Numbers never go back.
  DEVICE bool find(const Groups& g, uint32_t tiles_n, uint32_t number, FoundTile& found) {
    while (number >= tiles_before + tiles) {
      tiles_before += tiles, tiles = 0;
      if (!(kGroups == kGroupIds ? read_rows(g) : read_groups(g))) return false;
      tiles_end = stretch.tiles_m() * tiles_n;
      const auto add_those_before = [&](uint32_t distance) {
        const uint32_t before = ptx::shfl_sync(tiles_end, ptx::lane_index() - distance);
        tiles_end += ptx::lane_index() >= distance ? before : 0;
      };
      if (kGroups != kGroupIds)
        for (uint32_t distance = 1; distance < 32; distance *= 2) add_those_before(distance);
      else if (are_many)
#pragma unroll 1  // or registers are too few
        for (uint32_t distance = 1; distance < 32; distance *= 2) add_those_before(distance);
      tiles = are_many ? ptx::shfl_sync(tiles_end, 31) : tiles_end;
    }
    const uint32_t tile = number - tiles_before;
    found.stretch = stretch, found.number = tile;
    if (are_many) {
      const uint32_t lane = ptx::reduce_min_sync(tile < tiles_end ? ptx::lane_index() : 31);
      found.stretch = stretch_of(lane);
      found.number = tile - (ptx::shfl_sync(tiles_end, lane) - found.stretch.tiles_m() * tiles_n);
    }
    return true;
  }

  // The stretch of a lane. Ids leave it in shared memory, since registers are few.
  DEVICE Stretch stretch_of(uint32_t lane) const {
    if constexpr (kGroups != kGroupIds)
      return {ptx::shfl_sync(stretch.first, lane), ptx::shfl_sync(stretch.end, lane), ptx::shfl_sync(stretch.group, lane)};
    const uint32_t first = ptx::ld_shared_b32(&runs()[lane]);
    return {first, ptx::ld_shared_b32(&runs()[lane + 1]), ptx::ld_shared_b32(&window[first - window_first])};
  }

  // Reads the next 32 groups, or the rest of them.
  DEVICE bool read_groups(const Groups& g) {
    if (at >= g.count) return false;
    const uint32_t group = at + ptx::lane_index() < g.count ? at + ptx::lane_index() : g.count - 1;
    const uint32_t start = start_of_group(g, group), end = end_of_group(g, group);
    stretch = {start, at + ptx::lane_index() < g.count && start < end ? end : start, group};
    at += 32;
    return true;
  }

  // Reads the next rows: of one group, or of several groups of few rows.
  DEVICE bool read_rows(const Groups& g) {
    while (at < g.rows) {
      if (at == window_end) open_window(g, at);
      uint32_t first = at;
      if (ptx::ld_shared_b32(&window[at - window_first]) >= g.count)  // most groups follow the one before at once
        first = find(at, [&](uint32_t id) { return id < g.count; });
      at = first;
      if (first == window_end) continue;
      if constexpr (kRunWords > 0) {
        are_many = read_runs(g);
        if (are_many) return true;
      }
      const uint32_t group = ptx::ld_shared_b32(&window[first - window_first]);
      uint32_t end = find(first + 1, [&](uint32_t id) { return id != group; });
      if (end == window_end && end < g.rows) {  // the group may go on: whole tiles now, or another look from here
        end = first + (end - first) / kBlockM * kBlockM;
        if (end == first) {
          open_window(g, first);
          continue;
        }
      }
      stretch = {first, end, group};
      at = end;
      return true;
    }
    return false;
  }

  // The first rows of 33 runs of one number.
  DEVICE uint32_t* runs() const { return window + kWindowRows; }

  // Reads the first 32 runs of one number that end within the next rows of the window; false if none does.
  DEVICE bool read_runs(const Groups& g) {
    const uint32_t lane = ptx::lane_index(), most = at == 0 ? 128 : 512;  // the first tile is waited for
    const uint32_t end_of_look = at + most < window_end ? at + most : window_end;
    const uint32_t* ids = window - window_first;
    uint32_t count = 0;
    ptx::syncwarp();  // all lanes have read the runs before
#pragma unroll 1
    for (uint32_t row = at + lane; row - lane < end_of_look && count <= 32; row += 32) {
      const bool is_first = row < end_of_look && (row == at || ptx::ld_shared_b32(&ids[row]) != ptx::ld_shared_b32(&ids[row - 1]));
      const uint32_t lanes = ptx::ballot_sync(is_first), number = count + ptx::popc(lanes & ((1u << lane) - 1));
      if (is_first && number <= 32) ptx::st_shared_b32(&runs()[number], row);
      count += ptx::popc(lanes);
    }
    ptx::syncwarp();
    if (count < 2) return false;
    const uint32_t last = count - 1 < 32 ? count - 1 : 32;  // the last run may go on behind the window; a 33rd run has no lane
    const uint32_t first = ptx::ld_shared_b32(&runs()[lane < last ? lane : last]);
    const uint32_t end = ptx::ld_shared_b32(&runs()[lane < last ? lane + 1 : last]);
    at = ptx::ld_shared_b32(&runs()[last]);
    stretch = {first, ptx::ld_shared_b32(&ids[first]) < g.count ? end : first, 0};
    return true;
  }

  // Brings the numbers of the rows from `first` on into shared memory.
  DEVICE void open_window(const Groups& g, uint32_t first) {
    window_first = first / 4 * 4;  // the layout is aligned to 16 bytes
    window_end = window_first + kWindowRows < g.rows ? window_first + kWindowRows : g.rows;
    ptx::syncwarp();  // all lanes have read the window before
    for (uint32_t row = window_first + ptx::lane_index() * 4; row < window_end; row += 128) {
      uint32_t* to = &window[row - window_first];
      if (row + 4 <= window_end)
        ptx::cp_async_16(to, g.layout + row);
      else  // nothing behind the layout is touched
        ptx::st_shared_v4_b32(to, id_in_memory(g, row), row + 1 < window_end ? id_in_memory(g, row + 1) : 0,
                              row + 2 < window_end ? id_in_memory(g, row + 2) : 0, 0);
    }
    ptx::cp_async_wait_all();
    ptx::syncwarp();
  }

  // Finds the first row from `first` on whose number fulfils a condition, or the window's end, 128 rows at a time.
  template <typename Condition>
  DEVICE uint32_t find(uint32_t first, const Condition& is_found) const {
#pragma unroll 1
    for (uint32_t quad = (first - window_first) / 4 * 4; quad < window_end - window_first; quad += 128) {
      const uint32_t at_lane = quad + ptx::lane_index() * 4, row = window_first + at_lane;
      const ptx::Uint4 ids = ptx::ld_shared_v4_b32(&window[at_lane < kWindowRows ? at_lane : 0]);
      uint32_t found = window_end;
      found = is_found(ids.w) && row + 3 >= first ? row + 3 : found;
      found = is_found(ids.z) && row + 2 >= first ? row + 2 : found;
      found = is_found(ids.y) && row + 1 >= first ? row + 1 : found;
      found = is_found(ids.x) && row >= first ? row : found;
      found = ptx::reduce_min_sync(found);
      if (found < window_end) return found;
    }
    return window_end;
  }
};
