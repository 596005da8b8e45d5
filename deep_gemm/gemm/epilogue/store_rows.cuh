// Stores accumulators to rows of D at any addresses, in this GPU's memory or in another GPU's: p.d has the address of
// each row, or 0 for a row that is not stored.
//
//   math warp:     free --wait--> 16 rows of a tile --stmatrix--> its part of a buffer --arrive--> ready
//   storing warp:  ready --wait--> the 64 rows of a warpgroup --16 bytes a lane, row by row--> address of the row --arrive--> free
//
// Storing waits for memory or a link. So idle warps of the producer store a tile while math warps multiply the next.
// With FP4 all of the producer's warps are busy, so each math warp stores its own rows. Each row is stored once: links
// are slower than memory.
#pragma once
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"
#include WORK

// 16 bytes more than the columns take, so the eight rows that stmatrix writes at a time are in different banks.
constexpr uint32_t kRowPitch = kBlockN * 2 + 16, kWarpBytes = 16 * kRowPitch;
static_assert(kUnitN % 16 == 0 && kBlockN <= 256 && !kOutputIsFp32, "pieces of 16 bytes of BF16, at most one of a row for each lane");
static_assert(kUnitsPerWarpgroup == kUnitsAlongN, "64 rows for each warpgroup");
static_assert(kStoringWarps == 0 || (kStoringWarps == kNumMathWarpgroups && kStoringWarps <= 2), "the producer's last two warps");

struct OutputStorage {
  alignas(1024) uint8_t buffers[kNumMathWarps * kWarpBytes];
};

struct OutputBarriers {
  uint64_t ready[kNumMathWarpgroups], free[kNumMathWarpgroups];  // one pair for each warpgroup's part of the buffer

  DEVICE void init() {
    for (uint32_t i = 0; i < kNumMathWarpgroups; ++i) ptx::mbarrier_init(&ready[i], 4), ptx::mbarrier_init(&free[i], 1);
  }
};

DEVICE void prefetch_output_map(const Params&) {}

DEVICE void prefetch_d(const Params&, const Tile&, uint32_t, uint32_t) {}

// kRows rows of a tile, copied from shared memory to their addresses by one warp.
template <uint32_t kRows>
struct RowsToStore {
  static constexpr uint32_t kAtOnce = 4;
  ptx::Uint2 addresses[ceil_div(kRows, 32)];  // the address of row i is in lane i % 32; 0: not stored

  // Asks for the addresses of rows from `first_row` of the tile on.
  DEVICE void expect(const Product& p, const Tile& tile, uint32_t first_row) {
#pragma unroll
    for (uint32_t i = 0; i < ceil_div(kRows, 32); ++i) {
      const uint32_t row_of_part = i * 32 + ptx::lane_index(), row = first_row + row_of_part, row_m = tile.row_m + row;
      addresses[i] = {0, 0};
      if (row_of_part < kRows && row >= tile.stored_before && row_m < tile.end_m)
        addresses[i] = ptx::ld_global_v2_b32(p.d + uint64_t{first_address_of(tile) + row} * 8);
    }
  }

  DEVICE void store(const Product& p, const uint8_t* rows, uint32_t row_n) const {
    const uint32_t left = row_n < p.n ? p.n - row_n : 0, bytes = (left < kBlockN ? left : kBlockN) * 2;
    const bool is_inside = ptx::lane_index() * 16 < bytes;
    const uint32_t at = is_inside ? ptx::lane_index() * 16 : 0;
#pragma unroll
    for (uint32_t part = 0; part < ceil_div(kRows, 32); ++part) {
      const ptx::Uint2 address = addresses[part];
#pragma unroll 1
      for (uint32_t first = 0; first < 32 && first < kRows; first += kAtOnce) {
        ptx::Uint4 pieces[kAtOnce];  // all are loaded before the first is stored
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) pieces[i] = ptx::ld_shared_v4_b32(rows + (part * 32 + first + i) * kRowPitch + at);
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const uint64_t to = uint64_t{ptx::shfl_sync(address.y, first + i)} << 32 | ptx::shfl_sync(address.x, first + i);
          if (to != 0 && is_inside)
            ptx::st_global_v4_b32(reinterpret_cast<uint8_t*>(to) + row_n * 2 + at, pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w);
        }
      }
    }
  }
};

// Stores a math warp's rows, tile by tile.
struct Output {
  OutputStorage& storage;
  OutputBarriers& barriers;
  const uint32_t warpgroup;
  uint32_t parity = 0;
  RowsToStore<16> own;  // used if there are no storing warps

  DEVICE Output(OutputStorage& storage_, OutputBarriers& barriers_, uint32_t warpgroup_)
      : storage(storage_), barriers(barriers_), warpgroup(warpgroup_) {}

  // Loads the addresses of rows while the tile is multiplied.
  DEVICE void expect(const Params& p, const Tile& tile) {
    if constexpr (kStoringWarps == 0) own.expect(p, tile, ptx::warp_index() * 16);
  }

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const Tile& tile, float (&total)[kUnits][kUnitN / 2]) {
    static_assert(kUnits == kUnitsAlongN, "whole rows");
    const uint32_t lane = ptx::lane_index();
    uint8_t* rows = storage.buffers + ptx::warp_index() * kWarpBytes;
    // The previous tile's rows have been read.
    if constexpr (kStoringWarps > 0) wait_until_free();
    else ptx::syncwarp();
    // stmatrix reads the address of row i of its four 8x8 matrices from lane i: as in epilogue/panels.cuh.
#pragma unroll
    for (uint32_t column = 0; column < kBlockN; column += 16) {
      const float* v = &total[column / kUnitN][column % kUnitN / 2];
      ptx::stmatrix_x4(rows + lane % 16 * kRowPitch + (column + lane / 16 * 8) * 2, ptx::pack_bf16(v[0], v[1]),
                       ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
    }
    ptx::syncwarp();  // all lanes have written
    if constexpr (kStoringWarps == 0) own.store(p, rows, tile.row_n);
    else if (lane == 0) ptx::mbarrier_arrive(&barriers.ready[warpgroup]);
  }

  DEVICE void wait_until_free() {
    ptx::mbarrier_wait_parity(&barriers.free[warpgroup], parity ^ 1), parity ^= 1;
  }

  // Makes the storing warp take a tile whose rows this warp has stored by itself.
  DEVICE void hand_over() {
    wait_until_free();
    ptx::syncwarp();  // all lanes have stored
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&barriers.ready[warpgroup]);
  }

  DEVICE void finish() {}
};

// The role of the producer's last warps, one for each math warpgroup.
DEVICE void store_tiles(const Params& p, OutputStorage& storage, OutputBarriers& barriers, Tiles& tiles, uint32_t warpgroup) {
  RowsToStore<64> rows;
  Share share;
  uint32_t parity = 0;
  for (Tile tile; tiles.next(tile);) {
    share.set(tile, warpgroup);
    if (!share.is_any) continue;
    rows.expect(p, tile, warpgroup * 64);
    ptx::mbarrier_wait_parity(&barriers.ready[warpgroup], parity);
    rows.store(p, storage.buffers + warpgroup * 4 * kWarpBytes, tile.row_n);
    ptx::syncwarp();  // all lanes have read the rows, and issued their stores
    if (ptx::lane_index() == 0) ptx::mbarrier_arrive(&barriers.free[warpgroup]);
    parity ^= 1;
  }
}

DEVICE void leave() {}
