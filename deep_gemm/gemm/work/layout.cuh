// The layout says which rows each group has. It is an array in global memory, which only the GPU reads. Its kinds:
//
//   kGroupIds      rows of A [m, k] and D [m, n]; the layout holds each row's group, -1: no group
//   kGroupEnds     the same rows; the layout holds each group's end, and the next group begins there, aligned
//   kGroupCounts   the first rows of each group's own A [rows, k] and D [rows, n]; the layout holds counts of rows
//
// For any values in the layout, no access is outside the operands.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

constexpr uint32_t kGroupIds = 1, kGroupEnds = 2, kGroupCounts = 3;
constexpr bool kRowsAreStacked = kGroups == kGroupIds || kGroups == kGroupEnds;

struct Groups {
  const int32_t* layout;
  uint64_t sfb_stride;  // from one group's scales of B to the next, in elements
  uint32_t count;       // the number of groups
  uint32_t rows;        // rows of A and D; with kGroupCounts, of each group's A and D
  uint32_t alignment;   // with kGroupEnds, of group starts, in rows; with all kinds, rows of a block of zeroed padding
  uint32_t zeroes_padding;
};

// Consecutive rows of one group, not necessarily all its rows: a search for the end of thousands of rows would make the
// first tile wait.
struct Stretch {
  uint32_t first, end, group;

  DEVICE uint32_t tiles_m() const { return ceil_div(end - first, kBlockM); }
};

// A found tile: its number in the raster of a stretch, and whether the tile has all of its columns or half of them.
struct FoundTile {
  Stretch stretch;
  uint32_t number;
  bool is_half = false, is_second_half = false;
};

DEVICE uint32_t id_of_row(const Groups& g, uint32_t row) {
  return static_cast<uint32_t>(ptx::ld_global_nc_i32(g.layout + row));  // -1, no group, becomes the largest number
}

// Like `id_of_row`, but before griddepcontrol's wait, as in the decode kernel: reads memory as cp_async_16 does.
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

// Finds stretches in the order of the layout, and counts their tiles. A whole warp does this: a load from global memory
// takes longer than a k-block, so each load reads much. All CTAs then find their first tile after one load, and begin
// together. When some CTAs began later, all CTAs ran 2% longer, because they shared fewer loads in the L2.
//
// Groups of few rows have low tiles. Ids are then read for 32 stretches at a time: one by one, a stretch takes 0.27 us,
// so math warps would wait 130 us for 500 groups. High tiles (a group has several) lack registers for this.
struct Stretches {
  uint32_t* window;  // in shared memory, with kGroupIds: the ids of rows from window_first up to window_end
  uint32_t window_first = 0, window_end = 0;
  bool are_many = kGroups != kGroupIds;  // true if each lane has its own current stretch, perhaps without rows
  Stretch stretch{};       // the current stretch, or this lane's
  uint32_t tiles_end = 0;  // tiles of the current stretches, up to the end of `stretch`
  uint32_t tiles_before = 0, tiles = 0;  // tiles of earlier stretches, and of the current ones
  uint32_t at = 0;         // the rows or groups of the layout that have been read

  DEVICE explicit Stretches(uint32_t* window_) : window(window_) {}

  // Finds the tile with a number, counted over all stretches; false past the last tile. Numbers must ascend.
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
#pragma unroll 1  // otherwise a thread has too few registers
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

  // Returns a lane's stretch. With ids, the stretches are in shared memory, because registers are few.
  DEVICE Stretch stretch_of(uint32_t lane) const {
    if constexpr (kGroups != kGroupIds)
      return {ptx::shfl_sync(stretch.first, lane), ptx::shfl_sync(stretch.end, lane), ptx::shfl_sync(stretch.group, lane)};
    const uint32_t first = ptx::ld_shared_b32(&runs()[lane]);
    return {first, ptx::ld_shared_b32(&runs()[lane + 1]), ptx::ld_shared_b32(&window[first - window_first])};
  }

  // Reads the next 32 groups, or the remaining ones.
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
      if (ptx::ld_shared_b32(&window[at - window_first]) >= g.count)  // most groups begin where the previous group ends
        first = find(at, [&](uint32_t id) { return id < g.count; });
      at = first;
      if (first == window_end) continue;
      if constexpr (kRunWords > 0) {
        are_many = read_runs(g);
        if (are_many) return true;
      }
      const uint32_t group = ptx::ld_shared_b32(&window[first - window_first]);
      uint32_t end = find(first + 1, [&](uint32_t id) { return id != group; });
      if (end == window_end && end < g.rows) {  // the group may continue: use whole tiles now, or look again from here
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

  // The first rows of 33 runs of one id.
  DEVICE uint32_t* runs() const { return window + kWindowRows; }

  // Reads the first 32 runs of one id that end within the next rows of the window; false if none ends there.
  DEVICE bool read_runs(const Groups& g) {
    const uint32_t lane = ptx::lane_index(), most = at == 0 ? 128 : 512;  // the first tile waits for this look
    const uint32_t end_of_look = at + most < window_end ? at + most : window_end;
    const uint32_t* ids = window - window_first;
    uint32_t count = 0;
    ptx::syncwarp();  // all lanes have read the previous runs
#pragma unroll 1
    for (uint32_t row = at + lane; row - lane < end_of_look && count <= 32; row += 32) {
      const bool is_first = row < end_of_look && (row == at || ptx::ld_shared_b32(&ids[row]) != ptx::ld_shared_b32(&ids[row - 1]));
      const uint32_t lanes = ptx::ballot_sync(is_first), number = count + ptx::popc(lanes & ((1u << lane) - 1));
      if (is_first && number <= 32) ptx::st_shared_b32(&runs()[number], row);
      count += ptx::popc(lanes);
    }
    ptx::syncwarp();
    if (count < 2) return false;
    const uint32_t last = count - 1 < 32 ? count - 1 : 32;  // the last run may go on after the window; a 33rd run has no lane
    const uint32_t first = ptx::ld_shared_b32(&runs()[lane < last ? lane : last]);
    const uint32_t end = ptx::ld_shared_b32(&runs()[lane < last ? lane + 1 : last]);
    at = ptx::ld_shared_b32(&runs()[last]);
    stretch = {first, ptx::ld_shared_b32(&ids[first]) < g.count ? end : first, 0};
    return true;
  }

  // Copies the ids of the rows from `first` on to shared memory.
  DEVICE void open_window(const Groups& g, uint32_t first) {
    window_first = first / 4 * 4;  // the layout is aligned to 16 bytes
    window_end = window_first + kWindowRows < g.rows ? window_first + kWindowRows : g.rows;
    ptx::syncwarp();  // all lanes have read the previous window
    for (uint32_t row = window_first + ptx::lane_index() * 4; row < window_end; row += 128) {
      uint32_t* to = &window[row - window_first];
      if (row + 4 <= window_end)
        ptx::cp_async_16(to, g.layout + row);
      else  // nothing after the layout is read
        ptx::st_shared_v4_b32(to, id_in_memory(g, row), row + 1 < window_end ? id_in_memory(g, row + 1) : 0,
                              row + 2 < window_end ? id_in_memory(g, row + 2) : 0, 0);
    }
    ptx::cp_async_wait_all();
    ptx::syncwarp();
  }

  // Finds the first row from `first` on whose id fulfils a condition, or the window's end, 128 rows at a time.
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
