// From accumulators to rows of D that lie anywhere, in this GPU's memory or in a peer's: p.d has the address of each row, 0 if
// it goes nowhere.
//
//   warp: 16 rows of a tile --stmatrix--> its part of a buffer --16 bytes a lane, row by row--> address of the row
//
// A warp keeps to its own rows, so warps do not wait for each other. Each row is stored once, as links are slower than memory.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"
#include WORK

// 16 bytes more than the columns take: eight rows, which stmatrix writes at a time, lie in different banks.
constexpr uint32_t kRowPitch = kBlockN * 2 + 16, kWarpBytes = 16 * kRowPitch;
constexpr uint32_t kUnitsAlongM = kUnitsPerWarpgroup / kUnitsAlongN;
static_assert(kUnitN % 16 == 0 && !kOutputIsFp32, "whole pieces of 16 bytes of BF16");

struct OutputStorage {
  alignas(1024) uint8_t buffers[kNumMathWarps * kWarpBytes];
};

struct OutputBarriers {
  DEVICE void init() {}
};

DEVICE void prefetch_output_map(const Params&) {}

DEVICE void prefetch_d(const Params&, const Tile&, uint32_t, uint32_t) {}

// What a warp stores, tile by tile.
struct Output {
  OutputStorage& storage;
  uint64_t addresses[kUnitsAlongM];  // where the rows of lanes 0 to 15 go; 0: nowhere

  DEVICE Output(OutputStorage& storage_, OutputBarriers&, uint32_t) : storage(storage_) {}

  // Addresses come while the tile is multiplied.
  DEVICE void expect(const Params& p, const Tile& tile) {
    const uint32_t row_of_lane = ptx::warp_index() * 16 + ptx::lane_index();
#pragma unroll
    for (uint32_t i = 0; i < kUnitsAlongM; ++i) {
      const uint32_t row = row_of_unit(i * kUnitsAlongN) + row_of_lane, row_m = tile.row_m + row;
      ptx::Uint2 words = {0, 0};
      if (ptx::lane_index() < 16 && row >= tile.stored_before && row_m < tile.end_m)
        words = ptx::ld_global_v2_b32(p.d + uint64_t{row_m} * 8);
      addresses[i] = uint64_t{words.y} << 32 | words.x;
    }
  }

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const Tile& tile, float (&total)[kUnits][kUnitN / 2]) {
    constexpr uint32_t kAtOnce = kUnits < kUnitsAlongN ? kUnits : kUnitsAlongN;  // units of the same rows
    const uint32_t lane = ptx::lane_index();
    uint8_t* rows = storage.buffers + ptx::warp_index() * kWarpBytes;
#pragma unroll
    for (uint32_t first = 0; first < kUnits; first += kAtOnce) {
      ptx::syncwarp();  // all have read what lay here before
      // stmatrix takes the address of row i of its four 8x8 matrices from lane i: as in epilogue/panels.cuh.
#pragma unroll
      for (uint32_t column = 0; column < kAtOnce * kUnitN; column += 16) {
        const float* v = &total[first + column / kUnitN][column % kUnitN / 2];
        ptx::stmatrix_x4(rows + lane % 16 * kRowPitch + (column + lane / 16 * 8) * 2, ptx::pack_bf16(v[0], v[1]),
                         ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
      }
      ptx::syncwarp();
      store_rows(p, rows, tile.row_n, kAtOnce * kUnitN, addresses[first / kUnitsAlongN]);
    }
  }

  DEVICE void store_rows(const Params& p, const uint8_t* rows, uint32_t row_n, uint32_t columns, uint64_t address) const {
    if (row_n >= p.n) return;
    const uint32_t bytes = (p.n - row_n < columns ? p.n - row_n : columns) * 2, low = address, high = address >> 32;
#pragma unroll 1
    for (uint32_t first = 0; first < 16; first += 4) {
#pragma unroll
      for (uint32_t row = first; row < first + 4; ++row) {
        const uint64_t to = uint64_t{ptx::shfl_sync(high, row)} << 32 | ptx::shfl_sync(low, row);
        if (to == 0) continue;
        for (uint32_t at = ptx::lane_index() * 16; at < bytes; at += 512) {
          const ptx::Uint4 piece = ptx::ld_shared_v4_b32(rows + row * kRowPitch + at);
          ptx::st_global_v4_b32(reinterpret_cast<uint8_t*>(to) + row_n * 2 + at, piece.x, piece.y, piece.z, piece.w);
        }
      }
    }
  }

  DEVICE void finish() {}
};

DEVICE void leave() {}
