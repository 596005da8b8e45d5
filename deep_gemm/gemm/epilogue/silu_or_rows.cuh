// The epilogues of both products of work/rows_twice.cuh: tiles of the first are activated and cast (silu.cuh), rows of the
// second go to addresses (store_rows.cuh). Storing warps count the first product's tiles: a release waits for stores.
#pragma once
#include "cast/division.cuh"
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"
#include GATES
#include WORK

namespace of_first {
#include "epilogue/silu.cuh"
}
namespace of_second {
#include "epilogue/store_rows.cuh"
}

using of_second::leave;
using of_second::prefetch_d;
using of_second::prefetch_output_map;

struct OutputStorage : of_first::OutputStorage, of_second::OutputStorage {};  // the first's are empty

struct OutputBarriers : of_first::OutputBarriers, of_second::OutputBarriers {
  using of_second::OutputBarriers::init;
};

struct Output {
  of_first::Output first;
  of_second::Output second;

  DEVICE Output(OutputStorage& storage, OutputBarriers& barriers, uint32_t warpgroup)
      : first(storage, barriers, warpgroup), second(storage, barriers, warpgroup) {
    second.parity = 1;  // the storing warp frees its buffer once it has fetched rows
  }

  DEVICE void expect(const Params&, const Tile&) {}

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const Tile& tile, float (&total)[kUnits][kUnitN / 2]) {
    if (tile.is_second) return second.store_tile(p, tile, total);
    first.store_tile(p, tile, total);
    second.hand_over();
  }

  DEVICE void finish() {}
};

// Called by the producer's last warps, one for each math warpgroup.
DEVICE void store_tiles(const Params& p, OutputStorage& storage, OutputBarriers& barriers, Tiles& tiles, uint32_t warpgroup) {
  of_second::RowsToStore<64> rows;
  Share share;
  uint32_t parity = 0;
  tiles.fetch_first_band(storage.buffers + warpgroup * 4 * of_second::kWarpBytes);
  ptx::syncwarp();  // all lanes have read their copies
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&barriers.free[warpgroup]);
  for (Tile tile; tiles.next(tile);) {
    share.set(tile, warpgroup);
    if (!share.is_any) continue;
    ptx::mbarrier_wait_parity(&barriers.ready[warpgroup], parity);
    if (ptx::lane_index() == 0) count_tile(p, tile);
    if (tile.is_second) {
      rows.expect(p.second, tile, warpgroup * 64);  // fetching the rows has stored their addresses
      rows.store(p.second, storage.buffers + warpgroup * 4 * of_second::kWarpBytes, tile.row_n);
    }
    ptx::syncwarp();  // all lanes have read the rows, and stored them
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&barriers.free[warpgroup]);
    parity ^= 1;
  }
  leave_zeros(p);
}
