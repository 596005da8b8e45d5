// CTAs of a cluster split k: each multiplies its share of a tile's k-blocks, and they add up their totals (exchange.cuh). Each
// CTA writes its share of the sums to D.
#pragma once
#include "config.cuh"
#include "epilogue/store_sum.cuh"
#include "exchange.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"
#include WORK

constexpr uint32_t kAccumulators = kUnitsPerWarpgroup * kUnitN / 2;

struct OutputStorage {
  alignas(1024) float exchange[exchange_floats(kAccumulators)];
};

struct OutputBarriers {
  uint64_t received;  // all chunks for this CTA have arrived
  uint64_t consumed;  // all CTAs have read their chunks of the tile before

  DEVICE void init() {
    ptx::mbarrier_init(&received, 1);          // one thread, announcing the bytes; then these land
    ptx::mbarrier_init(&consumed, kClusterK);  // one thread of each CTA
  }
};

DEVICE void prefetch_output_map(const Params&) {}

DEVICE void prefetch_d(const Params&, const Tile&, uint32_t, uint32_t) {}

// Adds up the CTAs' totals of a tile, and stores this CTA's share of the sums.
struct Output {
  float* exchange;
  OutputBarriers& barriers;
  uint32_t parity = 0;  // of the exchange's barrier, a phase for each tile

  DEVICE Output(OutputStorage& storage, OutputBarriers& barriers_, uint32_t)
      : exchange(storage.exchange), barriers(barriers_) {}

  DEVICE void expect(const Params&, const Tile&) {}

  DEVICE void store_tile(const Params& p, const Tile& tile, Totals& total) {
    constexpr uint32_t kShare = chunks_per_cta(kAccumulators), kQuadsPerUnit = kUnitN / 8;
    const uint32_t rank = ptx::cluster_rank(), warp = ptx::warp_index(), lane = ptx::lane_index();
    if (warp == 0 && lane == 0) expect_chunks<kAccumulators>(&barriers.received, rank);  // some may have come already
    ptx::mbarrier_wait_parity(&barriers.consumed, parity ^ 1);
    send_chunks(reinterpret_cast<float(&)[kAccumulators]>(total), exchange, &barriers.received, rank, 0, warp, lane);
    ptx::mbarrier_wait_parity_cluster(&barriers.received, parity);
    parity ^= 1;
    for (uint32_t chunk_of_cta = warp; chunk_of_cta < kShare; chunk_of_cta += kNumMathWarps) {
      const uint32_t chunk = rank * kShare + chunk_of_cta;
      if (chunk >= chunks_of_tile(kAccumulators)) break;
      const uint32_t unit = chunk / kNumMathWarps / kQuadsPerUnit, quad = chunk / kNumMathWarps % kQuadsPerUnit;
      const uint32_t owner = chunk % kNumMathWarps;  // whose registers it was in
      const uint32_t row = owner / 4 * 64 + unit / kUnitsAlongN * kUnitStride + owner % 4 * 16;
      store_sum(p.d, p.d_pitch, p.c, p.c_pitch, sum_chunk<kAccumulators>(exchange, chunk_of_cta, lane), tile.row_m + row,
                tile.row_n + column_of_unit(unit) + quad * 8, p.m, p.n, lane);
    }
    // The next tile's chunks may come once all warps of this CTA have read theirs.
    ptx::bar_sync(1, kNumMathWarps * 32);
    if (warp == 0 && lane < kClusterK) ptx::mbarrier_arrive_cluster(&barriers.consumed, lane);
  }

  DEVICE void finish() {}
};

// A CTA whose tiles are done may still be told that another has consumed its chunks.
DEVICE void leave() { ptx::cluster_sync(); }
