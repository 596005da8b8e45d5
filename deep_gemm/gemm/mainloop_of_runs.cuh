// The loop over the k-blocks of a tile, by one math warpgroup, if no scale changes along k:
//
//   a run of kRunKBlocks k-blocks   --> WGMMA, from zero: the tensor cores' sums have few bits
//   total += the run's sums         in FP32, run by run
//   total *= round(sfa * sfb)       behind the last run
//
// Scales are asked for before the tile begins. Each lane has those of its rows of A, and of B those of every 32nd column of the
// tile, which shuffles hand out at last.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"
#include "run.cuh"
#include "skip.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include CONVERT
#include EPILOGUE
#include WORK

static_assert(kUnitsPerWarpgroup == 1, "a run's sums beside the totals");

struct Operands : RunOperands {
  DEVICE Operands(const uint8_t* first_a, const uint8_t* first_b, const float*, uint32_t warpgroup)
      : RunOperands{ptx::smem_descriptor_low(ptx::smem_address(first_a) + warpgroup * 64 * kBlockK),
                    ptx::smem_descriptor_low(ptx::smem_address(first_b)), kABytes / 16, kBBytes / 16} {}
};

struct FirstScales {
  float of_rows[2], of_columns[ceil_div(kBlockN, 32)];
};

// Which of the groups that have scales of their own a tile is of.
template <typename Tile>
DEVICE uint64_t group_of(const Tile& tile) {
  if constexpr (requires { tile.group; }) return tile.group;
  return 0;
}

// Asks for a tile's scales. Those past the last row or column are the last one's: never an address outside.
DEVICE void begin_scales(const Params& p, const Tile& tile, FirstScales& first) {
  const float *sfa = reinterpret_cast<const float*>(p.whole_sfa[0]) + group_of(tile) * p.whole_sfa[2], *sfb = sfb_of(p, tile);
  const uint32_t first_row = tile.row_m + ptx::warp_index() * 16 + ptx::lane_index() / 4, first_column = tile.row_n + ptx::lane_index();
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    const uint32_t row = first_row + i * 8;
    first.of_rows[i] = ptx::ld_global_f32(sfa + (row < p.m ? row : p.m - 1) * p.whole_sfa[1]);
  }
#pragma unroll
  for (uint32_t i = 0; i < ceil_div(kBlockN, 32); ++i) {
    const uint32_t column = first_column + i * 32;
    first.of_columns[i] = ptx::ld_global_nc_f32(sfb + static_cast<uint64_t>(column < p.n ? column : p.n - 1) * p.sfb_stride_n);
  }
}

// Multiplies the k-blocks of one tile.
DEVICE void multiply_tile(const Params& p, Ring& ring, const Operands& operands, const FirstScales& scales, const Tile& tile,
                          RingPosition& at, Passes&, const Share&, Output&, Totals& total) {
  const KBlocks k_blocks = k_blocks_of(p, tile);
#pragma unroll
  for (float& x : total[0]) x = 0;
#pragma unroll 1
  for (uint32_t first = k_blocks.first; first < k_blocks.end; first += kRunKBlocks) {
    const uint32_t left = k_blocks.end - first;
    float sum[kUnitN / 2];
    multiply_run<kUnitN>(ring, operands, left < kRunKBlocks ? left : kRunKBlocks, at, sum);
#pragma unroll
    for (uint32_t i = 0; i < kUnitN / 2; ++i) total[0][i] = ptx::add_rn(total[0][i], sum[i]);
  }
#pragma unroll
  for (uint32_t column = 0; column < kUnitN; column += 8) {
    const uint32_t lane = column % 32 + ptx::lane_index() % 4 * 2;
    const float of_lane = scales.of_columns[column / 32];
    const float of_columns[2] = {ptx::shfl_sync(of_lane, lane), ptx::shfl_sync(of_lane, lane + 1)};
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i)
      total[0][column / 2 + i] = ptx::mul_rn(total[0][column / 2 + i], scales.of_rows[i / 2] * of_columns[i % 2]);
  }
}
