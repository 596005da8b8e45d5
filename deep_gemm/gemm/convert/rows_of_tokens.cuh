// B lies in memory as WGMMA reads it. A's rows are tokens, which lie anywhere, and TMA takes no list of rows. So the producer's last
// warps copy them, each its part of a tile's rows, to where TMA would have put them:
//
//   copying warp   of the slot kInFlight before: landed, made visible to WGMMA --arrive--> full
//                  empty --wait--> 4 rows at a time, 16 bytes a lane --cp.async--> slot
//
// Rows behind a group's end are its last one, or zeros if a warp has no others; columns behind k are zeros.
#pragma once
#include "config.cuh"
#include "convert/as_it_lies.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include WORK

constexpr uint32_t kRowsOfWarp = kBlockM / kScalingWarps, kRowsAtOnce = 4, kCopies = kRowsOfWarp / kRowsAtOnce;
// Slots that a warp copies to before it waits for the first. The math warps give a slot back once they have begun with the next.
constexpr uint32_t kInFlight = 2;
static_assert(kInFlight < kNumStages, "a slot must be full before a warp waits for one that is free only behind it");

// By the producer's last warps.
template <typename Storage>
DEVICE void scale_tiles(const Params& p, Storage& shared, Tiles& tiles, uint32_t warp) {
  const uint32_t row_of_lane = ptx::lane_index() / 8, chunk = ptx::lane_index() % 8, pitch = p.tokens[2] / 16;
  const uint8_t* const a = reinterpret_cast<const uint8_t*>(p.tokens[0]) + chunk * 16;
  const int32_t* const token_of = reinterpret_cast<const int32_t*>(p.tokens[1]);
  RingPosition at, landing;
  uint32_t in_flight = 0;
  const auto land = [&] {
    ptx::fence_proxy_async_shared();
    ptx::syncwarp();
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&shared.ring.full[landing.stage]);
    landing = landing.next();
  };
  for (Tile tile; tiles.next(tile);) {
    const uint32_t first_row = tile.row_m + warp * kRowsOfWarp, end = k_blocks_of(p, tile).end;
    uint32_t begins[kRowsOfWarp / 32];  // of rows i * 32 + lane, in units of 16 bytes
#pragma unroll
    for (uint32_t i = 0; i < kRowsOfWarp / 32; ++i) {
      const uint32_t row = first_row + i * 32 + ptx::lane_index();
      begins[i] = ptx::ld_global_nc_i32(token_of + (row < tile.end_m ? row : tile.end_m - 1)) * pitch;
    }
#pragma unroll 1
    for (uint32_t k_block = 0; k_block < end; ++k_block, at = at.next()) {
      const bool is_there = first_row < tile.end_m && k_block * kBlockK + chunk * 8 < p.k;
      uint8_t* const to = shared.a[at.stage] + (warp * kRowsOfWarp + row_of_lane) * kLineBytes;
      if (in_flight < kInFlight) ++in_flight;
      else ptx::cp_async_wait_group<kInFlight - 1>(), land();
      wait_until_free(shared.ring, at);
#pragma unroll
      for (uint32_t i = 0; i < kCopies; ++i) {
        const uint32_t swizzled = chunk ^ (row_of_lane + i % 2 * kRowsAtOnce);  // PTX ISA, "Swizzling Modes": by the row modulo 8
        const uint32_t begin = ptx::shfl_sync(begins[i * kRowsAtOnce / 32], i * kRowsAtOnce % 32 + row_of_lane);
        ptx::cp_async_16_or_zeros(to + i * kRowsAtOnce * kLineBytes + swizzled * 16,
                                  a + uint64_t{begin + k_block * (kLineBytes / 16)} * 16, is_there);
      }
      ptx::cp_async_commit();
    }
  }
  ptx::cp_async_wait_all();
  for (; in_flight > 0; --in_flight) land();
}
