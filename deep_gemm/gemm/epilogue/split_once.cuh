// CTAs of a cluster split k, and the grid has a cluster for each tile: the CTAs add up once, and then exit. Unlike in
// split.cuh, CTAs meet only here, so first loads do not wait for another CTA, and sums of rows past D are not sent.
//
// A warp's accumulators are quads: 16 rows by 8 columns. Quads are dealt to the CTAs in turn. A CTA adds up its quads
// for all math warps, in order of rank, which is the order of k.
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

static_assert(kUnitsPerWarpgroup == 1, "16 rows for each math warp");
constexpr uint32_t kQuads = kUnitN / 8, kQuadsPerCta = ceil_div(kQuads, kClusterK);

struct OutputStorage {
  alignas(1024) float exchange[kClusterK * kQuadsPerCta * kNumMathWarps * kChunkFloats];
};

struct OutputBarriers {
  uint64_t received;  // all quads for this CTA have arrived

  DEVICE void init() { ptx::mbarrier_init(&received, 1); }  // one thread announces the bytes
};

DEVICE void prefetch_output_map(const Params&) {}

DEVICE void prefetch_d(const Params&, const Tile&, uint32_t, uint32_t) {}

// Adds up the CTAs' totals of their tile, and stores this CTA's share of the sums.
struct Output {
  float* exchange;
  uint64_t* received;

  DEVICE Output(OutputStorage& storage, OutputBarriers& barriers, uint32_t)
      : exchange(storage.exchange), received(&barriers.received) {}

  DEVICE static uint32_t place(uint32_t sender, uint32_t quad_of_cta, uint32_t warp) {
    return ((sender * kQuadsPerCta + quad_of_cta) * kNumMathWarps + warp) * kChunkFloats;
  }

  DEVICE void expect(const Params&, const Tile&) {}

  DEVICE void store_tile(const Params& p, const Tile& tile, Totals& total) {
    const uint32_t rank = ptx::cluster_rank(), warp = ptx::warp_index(), lane = ptx::lane_index();
    const uint32_t used = ceil_div(p.m - tile.row_m, 16), warps = used < kNumMathWarps ? used : kNumMathWarps;
    const uint32_t own_quads = rank < kQuads ? ceil_div(kQuads - rank, kClusterK) : 0;
    if (warp == 0 && lane == 0)
      ptx::mbarrier_arrive_expect_tx(received, kClusterK * own_quads * warps * kChunkFloats * 4);
    ptx::cluster_wait();  // all CTAs run, and have initialized their barriers
    if (warp < warps) {
#pragma unroll
      for (uint32_t quad = 0; quad < kQuads; ++quad) {
        const float* v = &total[0][quad * 4];
        float* to = exchange + place(rank, quad / kClusterK, warp) + lane * 4;
        ptx::st_async_v4_f32(to, received, quad % kClusterK, v[0], v[1], v[2], v[3]);
      }
    }
    ptx::mbarrier_wait_parity_cluster(received, 0);
    for (uint32_t chunk = warp; chunk < own_quads * warps; chunk += kNumMathWarps) {
      const uint32_t quad_of_cta = chunk / warps, owner = chunk % warps;
      const float* from = exchange + place(0, quad_of_cta, owner) + lane * 4;
      ptx::Float4 sum = ptx::ld_shared_v4_f32(from);
#pragma unroll
      for (uint32_t sender = 1; sender < kClusterK; ++sender) {
        const ptx::Float4 addend = ptx::ld_shared_v4_f32(from + place(sender, 0, 0));
        sum.x += addend.x, sum.y += addend.y, sum.z += addend.z, sum.w += addend.w;
      }
      store_sum(p.d, p.d_pitch, p.c, p.c_pitch, sum, tile.row_m + owner * 16,
                tile.row_n + (quad_of_cta * kClusterK + rank) * 8, p.m, p.n, lane);
    }
  }

  DEVICE void finish() {}
};

// A CTA stays until all its quads have arrived. Its math warps have waited for them, and before for other CTAs.
DEVICE void leave() {
  if (ptx::warp_index() >= kNumMathWarps) ptx::cluster_wait();
}
