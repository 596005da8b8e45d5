// Rows that the kernel fetches while it multiplies those that have come. Two warps of each CTA's producer do it, by TMA:
//
//   warp 2:  free --wait--> row in a room, of this rank or a peer --bulk load, bytes--> landed
//   warp 3:  landed --wait--> bulk stores to its rows of A, one for each route here; scales to sfa[block][rows]
//            written: arrivals[part] += 1 for each row --release, acquire--> finding warp: deals tiles of whole parts
//            --arrive--> free
//
// Warps take rows by a count, in the order in which tiles need them. So parts are whole soon, and nobody waits for a warp
// that may not run yet. A slot is fetched with the first of its rows, for all of them.
#pragma once
#include ROWS_PARAMS
#include "lanes.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "rooms.cuh"

constexpr uint32_t kNoSlot = ~0u, kNoPart = ~0u;

struct ArrivalStorage {
  alignas(128) uint8_t rows[kFetchedBytes];  // a ring of rows, as many as there is room for
  uint64_t landed[kMostFetched], free[kMostFetched];
  // Of the slot in each place:
  uint32_t slots[kMostFetched];  // its number; kNoSlot behind the last one
  int32_t routes[kMostFetched][kMostRoutes];  // its rows of A, -1: none

  DEVICE void init() {
    for (uint32_t i = 0; i < kMostFetched; ++i)
      ptx::mbarrier_init(&landed[i], 1), ptx::mbarrier_init(&free[i], 1);  // Ring::init fences all
  }
};

// How many rows of a part have come.
DEVICE uint32_t* arrivals_of(const Params& p, uint32_t part) { return p.fetching.arrivals + 1 + part; }

// By the warp that finds tiles: until rows [first, end) have come. Nobody waits for rows that are of no use.
DEVICE void wait_for_rows(const Params& p, uint32_t first, uint32_t end) {
  if (!is_whole(p.fetching.meeting)) return;
  const uint32_t used = end_of_group(p.groups, p.groups.count - 1);
#pragma unroll 1
  for (uint32_t part = first / kRowsOfPart; part * kRowsOfPart < end; ++part) {
    const uint32_t left = used - part * kRowsOfPart, rows = left < kRowsOfPart ? left : kRowsOfPart;
    while (ptx::ld_acquire_gpu_b32(arrivals_of(p, part)) != rows) {
    }
  }
  ptx::fence_proxy_async_global();  // TMA loads what other threads have stored
}

// Where a warp stands in the ring of rows, whose length depends on theirs.
struct RowRing {
  ArrivalStorage& storage;
  const uint32_t row_bytes, length;
  uint32_t place = 0, parity = 0;

  DEVICE RowRing(const Params& p, ArrivalStorage& storage_)
      : storage(storage_),
        row_bytes(p.fetching.row_bytes),
        length(kFetchedBytes / row_bytes < kMostFetched ? kFetchedBytes / row_bytes : kMostFetched) {}

  DEVICE void advance() {
    parity ^= place + 1 == length;
    place = place + 1 == length ? 0 : place + 1;
  }
  DEVICE uint8_t* row() const { return storage.rows + place * row_bytes; }
};

struct RowLoader {
  static constexpr uint32_t kRowsAtOnce = 8, kLanesOfRow = 32 / kRowsAtOnce;
  const Params& p;
  RowRing ring;
  const uint32_t lane;

  DEVICE RowLoader(const Params& p_, ArrivalStorage& storage) : p(p_), ring(p_, storage), lane(ptx::lane_index()) {}

  DEVICE void load_all() {
    uint32_t first = ptx::shfl_sync(take(), 0);
#pragma unroll 1
    while (first < p.m) {
      const uint32_t following = take();  // the answer takes as long as a row
      const uint32_t row = first + lane / kLanesOfRow;
      const int32_t slot = row < p.m ? ptx::ld_global_i32(p.fetching.token_of + row) : -1;
#pragma unroll 1
      for (uint32_t left = rows_that_are_first(slot, row); left != 0; left &= left - 1)
        load(ptx::shfl_sync(static_cast<uint32_t>(slot), lowest(left)));
      if (!ptx::all_sync(slot >= 0)) break;  // rows behind the last have no slot
      first = ptx::shfl_sync(following, 0);
    }
    load(kNoSlot);
  }

  DEVICE uint32_t take() const {
    return lane == 0 ? ptx::atom_add(p.fetching.arrivals, kRowsAtOnce) : 0;
  }

  // Of each row's lanes the first, if no row of its slot is before it.
  DEVICE uint32_t rows_that_are_first(int32_t slot, uint32_t row) const {
    const Fetching& f = p.fetching;
    bool has_before = slot < 0;
#pragma unroll 1
    for (uint32_t j = lane % kLanesOfRow; slot >= 0 && j < f.topk; j += kLanesOfRow)
      has_before |= ptx::ld_global_b32(f.row_of + static_cast<uint64_t>(slot) * f.topk + j) < row;
    uint32_t votes = ptx::ballot_sync(has_before);
    votes |= votes >> 1;
    votes |= votes >> 2;
    return ~votes & 0x11111111;
  }

  DEVICE void load(uint32_t slot) {
    const Fetching& f = p.fetching;
    ArrivalStorage& storage = ring.storage;
    const bool is_route = slot != kNoSlot && lane < f.topk;
    const int32_t row = is_route ? ptx::ld_global_i32(f.row_of + uint64_t{slot} * f.topk + lane) : -1;
    ptx::mbarrier_wait_parity(&storage.free[ring.place], ring.parity ^ 1);
    if (lane == 0) ptx::st_shared_b32(&storage.slots[ring.place], slot);
    ptx::st_shared_b32(&storage.routes[ring.place][lane], row);
    ptx::syncwarp();
    if (lane == 0) {
      uint64_t* landed = &storage.landed[ring.place];
      if (slot != kNoSlot) {
        ptx::mbarrier_arrive_expect_tx(landed, f.row_bytes);
        ptx::bulk_load(landed, ring.row(), row_of_slot(f.meeting, slot, f.max_tokens, f.row_bytes), f.row_bytes);
      } else {
        ptx::mbarrier_arrive(landed);
      }
    }
    ring.advance();
  }
};

struct RowStorer {
  const Params& p;
  RowRing ring;
  const uint32_t lane;
  uint32_t unwritten = kNoSlot;  // the place of the slot that was stored last, if nobody knows yet that it is written
  uint32_t part = kNoPart;       // of its row that this lane has stored

  DEVICE RowStorer(const Params& p_, ArrivalStorage& storage) : p(p_), ring(p_, storage), lane(ptx::lane_index()) {}

  DEVICE void store_all() {
    ArrivalStorage& storage = ring.storage;
#pragma unroll 1
    while (true) {
      uint64_t* landed = &storage.landed[ring.place];
      if (!ptx::all_sync(ptx::mbarrier_test_wait_parity(landed, ring.parity))) {
        settle<0>();  // while there is time
        ptx::mbarrier_wait_parity(landed, ring.parity);
      }
      const uint32_t slot = ptx::ld_shared_b32(&storage.slots[ring.place]);
      if (slot == kNoSlot) break;
      const uint32_t part_of_row = store(slot);
      settle<1>();
      unwritten = ring.place, part = part_of_row;
      ring.advance();
    }
    settle<0>();
  }

  // Gives the part of this lane's row.
  DEVICE uint32_t store(uint32_t slot) const {
    const Fetching& f = p.fetching;
    const int32_t row = static_cast<int32_t>(ptx::ld_shared_b32(&ring.storage.routes[ring.place][lane]));
    if (row >= 0) {
      ptx::bulk_store(f.values + static_cast<uint64_t>(row) * p.k, ring.row(), p.k);
      say_where(slot, row);
    }
    ptx::tma_store_commit();
#pragma unroll 1
    for (uint32_t left = ptx::ballot_sync(row >= 0); left != 0; left &= left - 1)
      lay_scales(ptx::shfl_sync(static_cast<uint32_t>(row), lowest(left)));
    return row >= 0 ? row / kRowsOfPart : kNoPart;
  }

  // By what weight a lane's row counts, and where its result goes.
  DEVICE void say_where(uint32_t slot, uint32_t row) const {
    const Fetching& f = p.fetching;
    if (f.weights != nullptr) ptx::st_global_f32(f.weights + row, ptx::ld_shared_f32(ring.row() + f.weights_at + lane * 4));
    store_address(f.addresses + row, place_of_result(f.meeting, slot, lane, f.max_tokens, f.topk, p.k, f.results));
  }

  DEVICE void lay_scales(uint32_t row) const {
    for (uint32_t block = lane; block < ceil_div(p.k, 128); block += 32)
      ptx::st_global_f32(p.fetching.sfa + uint64_t{block} * p.fetching.pitch + row, ptx::ld_shared_f32(ring.row() + p.k + block * 4));
  }

  // Waits until all but the newest kNewer slots are written, which is all but the one that is unwritten, and tells.
  template <uint32_t kNewer>
  DEVICE void settle() {
    if (unwritten == kNoSlot) return;
    ptx::tma_store_wait<kNewer>();
    ptx::syncwarp();  // each lane has stored, and read the place
    if (part != kNoPart) ptx::red_release_gpu_add(arrivals_of(p, part), 1);
    if (lane == 0) ptx::mbarrier_arrive(&ring.storage.free[unwritten]);
    unwritten = kNoSlot;
  }
};

// By the producer's other warps.
DEVICE void fetch_rows(const Params& p, ArrivalStorage& storage, uint32_t warp) {
  const Fetching& f = p.fetching;
  if (!is_whole(f.meeting)) {
    if (warp == 2) send_nowhere(f.addresses, p.m, ptx::block_index() * 32 + ptx::lane_index(), ptx::grid_size() * 32);
    return;
  }
  if (warp == 2) RowLoader(p, storage).load_all();
  if (warp == 3) RowStorer(p, storage).store_all();
}
