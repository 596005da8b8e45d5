// The sums of gather_weighted for many tokens. Rows pass through a ring in shared memory, so loads fill all slots of the ring,
// even if a token has few rows, and while sums are stored.
//
//   producer, one warp:  empty --wait--> a piece of a row, by a bulk copy --bytes--> full
//   math warps:          full  --wait--> times its weight, added --arrive--> empty;  after a token's last row: stored
//
// A unit is kPiece columns of a token. CTAs process units in turn, and both roles visit the same units in the same order. A role
// loads the row numbers of the next unit while it handles the rows of the current one.
#pragma once
#include "gather/params.cuh"
#include "lanes.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"

constexpr uint32_t kMathThreads = kNumMathWarps * 32;
constexpr uint32_t kPanel = kMathThreads * kColumns;  // 8 columns for each math thread
constexpr uint32_t kPiece = kPanels * kPanel;          // columns that a slot holds
static_assert(kNumThreads == kMathThreads + 32, "math warps, and a producer behind them");

struct SharedStorage {
  alignas(16) uint8_t rows[kNumStages][kPiece * 2];
  Ring ring;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "ManyConfig.shared_bytes and SharedStorage differ");

// Up to 32 routes of a unit, one in each lane.
struct Routes {
  uint32_t unit, token, column;  // the unit, its token, and its first column
  uint32_t first;                // the route of lane 0, counted within the token
  int32_t row;                   // -1: none
  float weight;
};

DEVICE uint32_t pieces_of(const GatherParams& p) { return ceil_div(p.n, kPiece); }

template <bool kWithWeights>
DEVICE Routes routes_of(const GatherParams& p, uint32_t unit, uint32_t first) {
  const uint32_t pieces = pieces_of(p), token = unit / pieces, j = first + ptx::lane_index();
  const bool is_there = token < p.tokens && j < p.topk;
  return {unit,
          token,
          (unit - token * pieces) * kPiece,
          first,
          is_there ? row_of(p, token, j) : -1,
          kWithWeights && is_there ? weight_of(p, token, j) : 0.f};
}

template <bool kWithWeights>
DEVICE Routes routes_behind(const GatherParams& p, const Routes& now) {
  const bool has_more = now.first + 32 < p.topk;
  return routes_of<kWithWeights>(p, has_more ? now.unit : now.unit + ptx::grid_size(), has_more ? now.first + 32 : 0);
}

DEVICE void load_rows(const GatherParams& p, SharedStorage& shared) {
  const uint32_t lane = ptx::lane_index();
  RingPosition at;
  Routes now = routes_of<false>(p, ptx::block_index(), 0);
#pragma unroll 1
  while (now.token < p.tokens) {
    const Routes next = routes_behind<false>(p, now);
    const uint32_t columns = p.n - now.column, bytes = (columns < kPiece ? columns : kPiece) * 2;
#pragma unroll 1
    for (uint32_t left = ptx::ballot_sync(now.row >= 0); left != 0; left &= left - 1) {
      const uint32_t row = ptx::shfl_sync(static_cast<uint32_t>(now.row), lowest(left));
      if (lane == 0) {
        wait_until_free(shared.ring, at);
        ptx::mbarrier_arrive_expect_tx(&shared.ring.full[at.stage], bytes);
        ptx::bulk_load(&shared.ring.full[at.stage], shared.rows[at.stage], row_at(p, row, now.column), bytes);
      }
      at = at.next();
    }
    now = next;
  }
}

// Sums up rows. A thread whose columns are past the last one adds up undefined values and stores nothing.
DEVICE void sum_rows(const GatherParams& p, SharedStorage& shared) {
  const uint32_t thread = ptx::thread_index(), lane = ptx::lane_index();
  float total[kPanels][kColumns] = {};
  RingPosition at;
  Routes now = routes_of<true>(p, ptx::block_index(), 0);
#pragma unroll 1
  while (now.token < p.tokens) {
    const Routes next = routes_behind<true>(p, now);
#pragma unroll 1
    for (uint32_t left = ptx::ballot_sync(now.row >= 0); left != 0; left &= left - 1) {
      const float weight = ptx::shfl_sync(now.weight, lowest(left));
      const uint8_t* slot = shared.rows[at.stage] + thread * (kColumns * 2);
      ptx::Uint4 row[kPanels];
      wait_until_loaded(shared.ring, at);
#pragma unroll
      for (uint32_t i = 0; i < kPanels; ++i) row[i] = ptx::ld_shared_v4_b32(slot + i * (kPanel * 2));
      // The shuffle waits for the loads of all lanes; without it, the arriving lane would wait only for its own loads.
      release(shared.ring, at, lane, ptx::shfl_sync(ptx::float_of(row[kPanels - 1].w), 0));
#pragma unroll
      for (uint32_t i = 0; i < kPanels; ++i) add_row(total[i], row[i], weight);
      at = at.next();
    }
    if (next.unit != now.unit) {
#pragma unroll
      for (uint32_t i = 0; i < kPanels; ++i) {
        const uint32_t column = now.column + i * kPanel + thread * kColumns;
        if (column < p.n) store_sums(sums_at(p, now.token, column), total[i]);
#pragma unroll
        for (uint32_t c = 0; c < kColumns; ++c) total[i][c] = 0.f;
      }
    }
    now = next;
  }
}

KERNEL(kNumThreads, kCtasPerSm) gather_weighted_many(GRID_CONSTANT GatherParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  if (ptx::thread_index() == 0) shared.ring.init();
  ptx::syncthreads();

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
  if (ptx::warp_index() == kNumMathWarps)
    load_rows(p, shared);
  else
    sum_rows(p, shared);
}
