// Fetches rows of the first product of work/rows_twice.cuh from the rooms of the ranks into a ring like the ring of the middle.
//
//   finding warp       claims kRowsOfUnit rows; while it deals tiles: whole[b - slots] --acquire--> the slot is free
//                      room --> slot, part by part, a tile dealt between two parts; fence, release --> fetched[b]
//   storing warps      the same before their first tile, for the rows of the first band
//   loading thread     fetched[b] --acquire, fence--> loads the slot by TMA
//
// Units are claimed in order of blocks. A warp that holds a unit tests whether the unit's slot is free, but never waits for
// it: so the warp goes on dealing tiles, and earlier blocks are multiplied.
#pragma once
#include "meeting.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

struct Rooms {
  const int32_t* token_of;  // [rows]: a row's token, as its place in the rooms
  const int32_t* row_of;    // [places, topk]: the rows of a token's routes, -1: none
  uint8_t* values;          // ring of rows, as A is
  float* scales;            // scales of the rows: [blocks of 128 columns, pitch]
  uint64_t* addresses;      // [rows]: the address of each row's result
  float* weights;           // ring of the rows' weights, or null
  uint64_t results;         // offset in a room of BF16 [max_tokens, topk, hidden]
  uint32_t pitch, scales_at, weights_at, topk, max_tokens, row_bytes;
};

constexpr uint32_t kRowsOfUnit = 4, kUnitsOfBlock = kBlockM / kRowsOfUnit, kLanesOfRow = 32 / kRowsOfUnit;
constexpr uint32_t kUnitsOfBand = kRasterGroup * kUnitsOfBlock;
// Shared memory of a warp's copies in flight: these columns of these rows of a unit.
constexpr uint32_t kStagedRows = 2, kStagedColumns = 4096, kStagingBytes = kStagedRows * kStagedColumns;

// The rows of a unit: `rows` rows of a block, from `row` on, which are copied to the ring from `row_of_ring` on. They are fetched
// in parts of kStagedRows x kStagedColumns; the part on its way begins at `staged_row`, `staged_column`.
struct Unit {
  uint32_t row, rows, row_of_ring, block;
  bool is_begun = false;
  uint32_t token = 0, staged_row = 0, staged_column = 0;  // `token` is of the row of this lane
};

// Fetches rows in parts; a whole warp calls it. Each lane reads only the bytes of `staging` that it copied there.
struct Fetch {
  const Rooms& rooms;
  const Meeting& meeting;
  uint32_t hidden;
  uint8_t* staging;

  DEVICE const uint8_t* room_row(uint32_t token) const { return row_of_slot(meeting, token, rooms.max_tokens, rooms.row_bytes); }

  // Asks for the first part, because links answer late, then stores addresses and copies scales. False if another rank did not come
  // in time: nothing is fetched then, because it may have changed ids while rows got tokens, so a row's token may be undefined.
  DEVICE bool begin(Unit& unit) const {
    const uint32_t lane = ptx::lane_index();
    unit.token = lane < unit.rows ? static_cast<uint32_t>(ptx::ld_global_i32(rooms.token_of + unit.row + lane)) : 0;
    if (!is_whole(meeting)) {
      if (lane < unit.rows) store_address(rooms.addresses + unit.row + lane, 0);
      return false;
    }
    unit.staged_row = unit.staged_column = 0;
    bring(unit);
    say_where(unit, ptx::shfl_sync(unit.token, lane / kLanesOfRow));
    copy_scales(unit);
    return true;
  }

  // Stores the part that was asked for, and asks for the next; false after the last part.
  DEVICE bool go_on(Unit& unit) const {
    put(unit);
    unit.staged_column += kStagedColumns;
    if (unit.staged_column >= hidden) unit.staged_column = 0, unit.staged_row += kStagedRows;
    if (unit.staged_row >= unit.rows) return false;
    bring(unit);
    return true;
  }

  // Stores the address of a row's result, and the row's weight; the lane that finds the row's route does it.
  DEVICE void say_where(const Unit& unit, uint32_t token) const {
    const uint32_t of_unit = ptx::lane_index() / kLanesOfRow, row = unit.row + of_unit;
    if (of_unit >= unit.rows) return;
    for (uint32_t route = ptx::lane_index() % kLanesOfRow; route < rooms.topk; route += kLanesOfRow) {
      if (static_cast<uint32_t>(ptx::ld_global_i32(rooms.row_of + uint64_t{token} * rooms.topk + route)) != row) continue;
      store_address(rooms.addresses + row, place_of_result(meeting, token, route, rooms.max_tokens, rooms.topk, hidden, rooms.results));
      if (rooms.weights == nullptr) continue;
      const float weight = ptx::ld_global_f32(room_row(token) + rooms.weights_at + route * 4);
      ptx::st_global_f32(rooms.weights + unit.row_of_ring + of_unit, weight);
    }
  }

  // Copies scales. A lane copies the scales of a block of columns, for all rows of the unit.
  DEVICE void copy_scales(const Unit& unit) const {
    const uint32_t blocks = ceil_div(hidden, 128);
#pragma unroll 1
    for (uint32_t block = ptx::lane_index(); block - ptx::lane_index() < blocks; block += 32) {
      float scales[kRowsOfUnit];
#pragma unroll
      for (uint32_t i = 0; i < kRowsOfUnit; ++i) {
        const uint8_t* const row = room_row(ptx::shfl_sync(unit.token, i));
        scales[i] = i < unit.rows && block < blocks ? ptx::ld_global_f32(row + rooms.scales_at + block * 4) : 0;
      }
      if (block < blocks)
        ptx::st_global_v4_f32(rooms.scales + uint64_t{block} * rooms.pitch + unit.row_of_ring, scales[0], scales[1], scales[2], scales[3]);
    }
  }

  // Calls `use` for this lane's pieces of a row, 16 bytes each, with the piece's place in `staging` and its column.
  template <typename Use>
  DEVICE void for_pieces(uint32_t staged_row, uint32_t first_column, const Use& use) const {
#pragma unroll 1
    for (uint32_t first = ptx::lane_index() * 16; first < kStagedColumns; first += 4 * 512)
#pragma unroll
      for (uint32_t column = first; column < first + 4 * 512; column += 512)
        if (first_column + column < hidden) use(staging + staged_row * kStagedColumns + column, first_column + column);
  }

  DEVICE void bring(const Unit& unit) const {
#pragma unroll 1
    for (uint32_t i = 0; i < kStagedRows && unit.staged_row + i < unit.rows; ++i) {
      const uint8_t* const from = room_row(ptx::shfl_sync(unit.token, unit.staged_row + i));
      for_pieces(i, unit.staged_column, [&](uint8_t* staged, uint32_t column) { ptx::cp_async_16(staged, from + column); });
    }
  }

  DEVICE void put(const Unit& unit) const {
    ptx::cp_async_wait_all();
#pragma unroll 1
    for (uint32_t i = 0; i < kStagedRows && unit.staged_row + i < unit.rows; ++i) {
      uint8_t* const to = rooms.values + uint64_t{unit.row_of_ring + unit.staged_row + i} * hidden;
      for_pieces(i, unit.staged_column, [&](const uint8_t* staged, uint32_t column) {
        const ptx::Uint4 piece = ptx::ld_shared_v4_b32(staged);
        ptx::st_global_v4_b32(to + column, piece.x, piece.y, piece.z, piece.w);
      });
    }
  }
};
