// From accumulators to rows of D that lie anywhere, in this GPU's memory or in a peer's: p.d has the address of each row, 0 if it
// goes nowhere.
//
//   warp: 16 rows of a unit --stmatrix--> its part of a buffer --a bulk copy for each row--> address of the row
//
// A warp keeps to its own rows, so warps do not wait for each other. A buffer is written again only once its rows were read.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"
#include WORK

// 16 bytes more than the columns take: eight rows, which stmatrix writes at a time, lie in different banks.
constexpr uint32_t kRowPitch = kUnitN * 2 + 16, kWarpBytes = 16 * kRowPitch, kBufferBytes = 4 * kWarpBytes;
constexpr uint32_t kUnitsAlongM = kUnitsPerWarpgroup / kUnitsAlongN;
static_assert(kUnitN % 16 == 0 && !kOutputIsFp32, "whole pieces of 16 bytes of BF16");

struct OutputStorage {
  alignas(1024) uint8_t buffers[kNumMathWarpgroups * kNumStoreBuffers * kBufferBytes];
};

struct OutputBarriers {
  DEVICE void init() {}
};

DEVICE void prefetch_output_map(const Params&) {}

DEVICE void prefetch_d(const Params&, const Tile&, uint32_t, uint32_t) {}

// What a warp stores, tile by tile.
struct Output {
  uint8_t* buffers;  // the warp's own part of its warpgroup's
  uint32_t row_of_lane, next_buffer = 0;
  uint64_t addresses[kUnitsAlongM];  // where the rows of a tile go that this lane copies; 0: nowhere

  DEVICE Output(OutputStorage& storage, OutputBarriers&, uint32_t warpgroup)
      : buffers(storage.buffers + warpgroup * kNumStoreBuffers * kBufferBytes + ptx::warp_index() % 4 * kWarpBytes),
        row_of_lane(warpgroup * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index()) {}

  // Addresses come while the tile is multiplied.
  DEVICE void expect(const Params& p, const Tile& tile) {
#pragma unroll
    for (uint32_t i = 0; i < kUnitsAlongM; ++i) {
      const uint32_t row = tile.row_m + row_of_unit(i * kUnitsAlongN) + row_of_lane;
      ptx::Uint2 words = {0, 0};
      if (ptx::lane_index() < 16 && row < tile.end_m) words = ptx::ld_global_v2_b32(p.d + uint64_t{row} * 8);
      addresses[i] = uint64_t{words.y} << 32 | words.x;
    }
  }

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const Tile& tile, float (&total)[kUnits][kUnitN / 2]) {
    const uint32_t lane = ptx::lane_index();
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      uint8_t* rows = buffers + next_buffer * kBufferBytes;
      ptx::tma_store_wait_read<kNumStoreBuffers - 1>();
      // stmatrix waits for all lanes. It takes the address of row i of its 8x8 matrices from lane i: as in epilogue/panels.cuh.
#pragma unroll
      for (uint32_t column = 0; column < kUnitN; column += 16) {
        const float* v = &total[unit][column / 2];
        ptx::stmatrix_x4(rows + lane % 16 * kRowPitch + (column + lane / 16 * 8) * 2, ptx::pack_bf16(v[0], v[1]),
                         ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
      }
      ptx::fence_proxy_async_shared();  // every writing thread, before what it wrote is copied
      ptx::syncwarp();
      const uint32_t column = tile.row_n + column_of_unit(unit);
      const uint64_t address = addresses[unit / kUnitsAlongN];
      if (address != 0 && column < p.n) {
        const uint32_t columns = p.n - column < kUnitN ? p.n - column : kUnitN;
        ptx::bulk_store(reinterpret_cast<uint8_t*>(address) + column * 2, rows + lane * kRowPitch, columns * 2);
      }
      ptx::tma_store_commit();
      next_buffer = next_buffer + 1 == kNumStoreBuffers ? 0 : next_buffer + 1;
    }
  }

  // No warp ends while its shared memory is read.
  DEVICE void finish() { ptx::tma_store_wait_read<0>(); }
};

DEVICE void leave() {}
