// The loop over the k-blocks of a tile, by one math warpgroup, if no scale changes along k: runs.cuh.
#pragma once
#include "runs.cuh"
#include "skip.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include CONVERT
#include EPILOGUE
#include WORK

static_assert(kUnitsPerWarpgroup == 1, "registers for a run's sums beside the totals");

struct Operands : RunOperands {
  DEVICE Operands(const uint8_t* first_a, const uint8_t* first_b, const float*, uint32_t warpgroup)
      : RunOperands{ptx::smem_descriptor_low(ptx::smem_address(first_a) + warpgroup * 64 * kBlockK),
                    ptx::smem_descriptor_low(ptx::smem_address(first_b)), kABytes / 16, kBBytes / 16} {}
};

struct FirstScales {
  float of_rows[2], of_columns[ceil_div(kBlockN, 32)];  // of the thread's rows of A; of every 32nd row of B
};

// Asks for a tile's scales. A may have groups of its own.
DEVICE void begin_scales(const Params& p, const auto& tile, FirstScales& first) {
  const float* sfa = reinterpret_cast<const float*>(p.whole_sfa[0]);
  if constexpr (requires { tile.group; }) sfa += tile.group * p.whole_sfa[2];
  load_scales(first.of_rows, sfa, p.whole_sfa[1], tile.row_m + ptx::warp_index() * 16 + ptx::lane_index() / 4, 8, p.m);
  load_scales(first.of_columns, sfb_of(p, tile), p.sfb_stride_n, tile.row_n + ptx::lane_index(), 32, p.n);
}

// Multiplies the k-blocks of one tile.
DEVICE void multiply_tile(const Params& p, Ring& ring, const Operands& operands, const FirstScales& scales, const Tile& tile,
                          RingPosition& at, Passes&, const Share&, Output&, Totals& total) {
  const KBlocks k_blocks = k_blocks_of(p, tile);
  multiply_runs<kUnitN>(ring, operands, k_blocks.end - k_blocks.first, at, total[0]);
#pragma unroll
  for (uint32_t i = 0; i < kUnitN / 2; ++i) {
    const uint32_t column = i / 4 * 8 + i % 2, lane = column % 32 + ptx::lane_index() % 4 * 2;
    const float of_column = ptx::shfl_sync(scales.of_columns[column / 32], lane);
    total[0][i] = ptx::mul_rn(total[0][i], scales.of_rows[i / 2 % 2] * of_column);
  }
}
