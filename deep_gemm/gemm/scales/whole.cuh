// No scale changes along k: partial sums are added unscaled, and a tile's totals are multiplied by round(sfa * sfb).
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "factors.cuh"
#include "scales/thread.cuh"
#include "tile.cuh"

struct FirstScales {
  float of_rows[kUnitsPerWarpgroup / kUnitsAlongN][2];  // of the thread's two rows of A in each unit of rows
  float of_columns[ceil_div(kBlockN, 32)];              // each lane has the scales of every 32nd row of B
};

struct TileScales {
  DEVICE TileScales(const float*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) {}
  DEVICE void ask(uint32_t, FirstScales&) const {}
  DEVICE void start(const FirstScales&) {}
  DEVICE void advance(uint32_t) {}
};

template <uint32_t kCount, uint32_t kPieces, uint32_t kOfUnit>
struct RunScales {
  DEVICE RunScales(const ThreadScales&, const TileScales&) {}
  DEVICE void begin_k_block(uint32_t, uint32_t) {}
  DEVICE void load_ahead(uint32_t, uint32_t, uint32_t) {}
  DEVICE void load_behind(uint32_t, uint32_t, uint32_t) {}

  // Adds by FFMA: after plain additions, ptxas makes the products of some tiles wait for each other (note C7511).
  template <typename Release>
  DEVICE void promote(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], uint32_t, uint32_t, uint32_t piece,
                      const Release& release_slot) const {
    if (piece + 1 == kPieces) release_slot(0.0f);  // no scale was loaded from the slot
#pragma unroll
    for (uint32_t i = 0; i < kUnitN / 2; ++i) total[i] = ptx::fma(partial[i], 1.0f, total[i]);
  }
};

// Loads the scales of a tile's rows and columns. Each group may have its own A.
DEVICE void ask_factors(const auto& p, const auto& tile, FirstScales& first) {
  const float* sfa = reinterpret_cast<const float*>(p.whole_sfa[0]);
  if constexpr (requires { tile.group; }) sfa += tile.group * p.whole_sfa[2];
  const uint32_t row = tile.row_m + ptx::warp_index() * 16 + ptx::lane_index() / 4;
#pragma unroll
  for (uint32_t unit = 0; unit < kUnitsPerWarpgroup; unit += kUnitsAlongN)
    load_scales(first.of_rows[unit / kUnitsAlongN], sfa, p.whole_sfa[1], row + row_of_unit(unit), 8, p.m);
  load_scales(first.of_columns, sfb_of(p, tile), p.sfb_stride_n, tile.row_n + ptx::lane_index(), 32, p.n);
}

// Multiplies a tile's totals by these scales.
template <uint32_t kUnits>
DEVICE void multiply_by_factors(float (&total)[kUnits][kUnitN / 2], const FirstScales& first) {
#pragma unroll
  for (uint32_t i = 0; i < kUnitN / 2; ++i)
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      const uint32_t column = column_of_unit(unit) + i / 4 * 8 + i % 2, lane = column % 32 + ptx::lane_index() % 4 * 2;
      const float of_column = ptx::shfl_sync(first.of_columns[column / 32], lane);
      total[unit][i] = ptx::mul_rn(total[unit][i], first.of_rows[unit / kUnitsAlongN][i / 2 % 2] * of_column);
    }
}
