// Copies received rows, or rows in the rooms of other ranks, to the rows of their experts. Values stay unchanged. The scales of a
// block of columns become contiguous, as products load them. `addresses` gets each result's address, `weights` each route's weight.
//
//   first CTAs, a warp for kColumns bytes:  slot | values | scales | weights |  --values, read once--> all rows of the slot
//   other CTAs (FP8 only), 32 rows each:   the rows' slots --scales--> shared memory --> sfa[block][rows]: one line for a block
//
// A row without a token stays unchanged; such rows follow all others.
#pragma once
#include "config.cuh"
#include "lanes.cuh"
#include "meeting.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct GatherRowsParams {
  const int32_t* token_of;  // [rows]: a row's slot
  const int32_t* row_of;    // [slots, topk]: the rows of a slot's routes, -1: none
  uint8_t* values;          // [rows, hidden]
  float* sfa;               // [blocks of 128 columns, pitch]
  float* weights;           // [rows], or null
  uint64_t* addresses;      // [rows], or null
  uint64_t results;         // offset in a room of BF16 [max_tokens, topk, hidden]
  uint32_t num_slots, rows, hidden, topk, scales_at, weights_at, pitch;  // hidden: bytes of a row
  uint32_t max_tokens, slot_bytes;  // of a rank; its slots begin at the start of its room
  Meeting meeting;
};
#include "gather_rows_params_layout.cuh"  // asserts the layout that core/params.py packs

constexpr uint32_t kWarps = kNumThreads / 32, kAtOnce = kColumns / 512;
constexpr uint32_t kRows = 32;  // rows whose scales a CTA lays out

struct SharedStorage {
  float scales[kRows][kMaxBlocks + 1];  // one more, so that rows of a block are in different banks
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "GatherRowsConfig.shared_bytes and SharedStorage differ");

// ---- Rows, and where they go

DEVICE const uint8_t* slot_at(const GatherRowsParams& p, uint32_t slot) {
  return row_of_slot(p.meeting, slot, p.max_tokens, p.slot_bytes);
}

// Copies kColumns bytes of a slot's values to the rows that the lanes of `mask` hold in `row`.
DEVICE void copy_values(const GatherRowsParams& p, const uint8_t* from, uint32_t stretch, uint32_t mask, uint32_t row,
                        uint32_t lane) {
  const uint32_t first = stretch * kColumns + lane * 16;
  ptx::Uint4 pieces[kAtOnce];  // all loads start before the first piece is stored
#pragma unroll
  for (uint32_t i = 0; i < kAtOnce; ++i)
    if (first + i * 512 < p.hidden) pieces[i] = ptx::ld_global_v4_b32(from + first + i * 512);
#pragma unroll 1
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const uint32_t to_row = ptx::shfl_sync(row, lowest(left));
    uint8_t* to = p.values + uint64_t{to_row} * p.hidden + first;
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i)
      if (first + i * 512 < p.hidden)
        ptx::st_global_v4_b32(to + i * 512, pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w);
  }
}

// Stores the weight of a route's row, and the address of its result.
DEVICE void say_where(const GatherRowsParams& p, uint32_t slot, uint32_t route, uint32_t row) {
  if (p.weights != nullptr)
    ptx::st_global_f32(p.weights + row, ptx::ld_global_f32(slot_at(p, slot) + p.weights_at + route * 4));
  if (p.addresses == nullptr) return;
  const uint64_t address = place_of_result(p.meeting, slot, route, p.max_tokens, p.topk, p.hidden / kValueBytes, p.results);
  store_address(p.addresses + row, address);
}

DEVICE void gather_slot(const GatherRowsParams& p, uint32_t slot, uint32_t stretch, uint32_t lane) {
#pragma unroll 1
  for (uint32_t first = 0; first < p.topk; first += 32) {
    const uint32_t route = first + lane;
    const int32_t row = route < p.topk ? ptx::ld_global_i32(p.row_of + uint64_t{slot} * p.topk + route) : -1;
    const uint32_t mask = ptx::ballot_sync(row >= 0);
    if (mask == 0) continue;
    if (row >= 0 && stretch == 0) say_where(p, slot, route, row);
    copy_values(p, slot_at(p, slot), stretch, mask, row, lane);
  }
}

DEVICE void lay_scales(const GatherRowsParams& p, SharedStorage& shared, uint32_t first_row) {
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index(), blocks = ceil_div(p.hidden, 128);
  const int32_t slot_of_lane = first_row + lane < p.rows ? ptx::ld_global_i32(p.token_of + first_row + lane) : -1;
#pragma unroll
  for (uint32_t i = warp; i < kRows; i += kWarps) {
    const int32_t slot = static_cast<int32_t>(ptx::shfl_sync(static_cast<uint32_t>(slot_of_lane), i));
    if (slot < 0) break;
    for (uint32_t block = lane; block < blocks; block += 32)
      ptx::st_shared_f32(&shared.scales[i][block], ptx::ld_global_f32(slot_at(p, slot) + p.scales_at + block * 4));
  }
  ptx::syncthreads();
  if (slot_of_lane < 0) return;
  for (uint32_t block = warp; block < blocks; block += kWarps)
    ptx::st_global_f32(p.sfa + uint64_t{block} * p.pitch + first_row + lane, ptx::ld_shared_f32(&shared.scales[lane][block]));
}

KERNEL(kNumThreads, kCtasPerSm) gather_rows(GRID_CONSTANT GatherRowsParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  if (p.addresses != nullptr && !is_whole(p.meeting)) {  // a rank did not come in time: its room is not touched
    const uint32_t thread = ptx::block_index() * kNumThreads + ptx::thread_index();
    for (uint32_t row = thread; row < p.rows; row += ptx::grid_size() * kNumThreads) store_address(p.addresses + row, 0);
    return;
  }
  const uint32_t stretches = ceil_div(p.hidden, kColumns), of_values = ceil_div(p.num_slots * stretches, kWarps);
  if (ptx::block_index() >= of_values) return lay_scales(p, shared, (ptx::block_index() - of_values) * kRows);
  const uint32_t unit = ptx::block_index() * kWarps + ptx::warp_index(), slot = unit / stretches;
  if (slot < p.num_slots) gather_slot(p, slot, unit % stretches, ptx::lane_index());
}
