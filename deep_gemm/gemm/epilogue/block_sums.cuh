// Turns accumulators, times `scale`, into log(sum(exp)) of each 128 columns of a row, and into the logit of the row's
// token. D has these logarithms, [m, ceil(n / 128)]; the product itself is stored nowhere.
//
// Four lanes hold the 128 columns of a row: each lane has two neighbouring columns of every eight. Pairs 0, 4, 8 and 12 of
// a lane make one sum, pairs 1, 5, 9 and 13 the next. The lane adds its four sums, then the lanes add theirs. Every tile,
// and softmax_piece.cuh, adds in this order.
#pragma once
#include "config.cuh"
#include "lanes.cuh"
#include "params.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"

struct Params : Product {
  const int32_t* tokens;  // each row's token, a column of the vocabulary
  float* chosen;          // the logit of each row's token
  uint32_t first;         // the product's first column in the vocabulary
  float scale;
};

constexpr uint32_t kBlock = 128;
static_assert(kUnitN % kBlock == 0, "a unit has whole blocks");

// No panels are stored.
struct Destination {
  uint32_t span = 0;

  DEVICE Destination(const Params&, const auto&, uint32_t) {}
  DEVICE void store(const uint8_t*, uint32_t, uint32_t) const {}
  DEVICE void prefetch(uint32_t, uint32_t) const {}
};

struct OutputStorage {};
struct OutputBarriers {
  DEVICE void init() {}
};
DEVICE void prefetch_output_map(const Params&) {}
DEVICE void prefetch_d(const Params&, const auto&, uint32_t, uint32_t) {}
DEVICE void leave() {}

// Computes and stores the sums of a warpgroup's tiles.
struct Output {
  DEVICE Output(OutputStorage&, OutputBarriers&, uint32_t) {}
  DEVICE void expect(const Params&, const auto&) {}
  DEVICE void finish() {}

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const auto& tile, const float (&total)[kUnits][kUnitN / 2]) {
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = tile.row_m + ptx::warp_index() * 16 + ptx::lane_index() / 4 + row_of_unit(unit) + half * 8;
        const uint32_t token = row < p.m ? ptx::ld_global_b32(p.tokens + row) - p.first : p.n;
#pragma unroll
        for (uint32_t block = 0; block < kUnitN; block += kBlock) {
          const uint32_t column = tile.row_n + column_of_unit(unit) + block;
          if (column >= p.n) continue;
          const auto logit = [&](uint32_t i) { return total[unit][block / 2 + i / 2 * 4 + half * 2 + i % 2]; };
          const float sum = p.n - column >= kBlock ? sum_of_block<false>(logit, p, column) : sum_of_block<true>(logit, p, column);
          if (row < p.m && ptx::lane_index() % 4 == 0)
            ptx::st_global_f32(reinterpret_cast<float*>(p.d) + row * p.d_pitch + column / kBlock, sum);
          const bool is_here = token < p.n && token / kBlock == column / kBlock;
          if (ptx::all_sync(!is_here)) continue;
#pragma unroll
          for (uint32_t i = 0; i < kBlock / 4; ++i)
            if (is_here && token % kBlock == column_of(i)) ptx::st_global_f32(p.chosen + row, ptx::mul_rn(logit(i), p.scale));
        }
      }
  }

  // Returns the column of a lane's logit, counted from the first column of its block.
  DEVICE static uint32_t column_of(uint32_t i) { return i / 2 * 8 + ptx::lane_index() % 4 * 2 + i % 2; }

  // Returns a row's sum in its four lanes. Columns past the last one add nothing.
  template <bool kIsCut>
  DEVICE static float sum_of_block(const auto& logit, const Params& p, uint32_t column) {
    const auto counts = [&](uint32_t i) { return !kIsCut || column + column_of(i) < p.n; };
    float most = kLeast, sums[4] = {};
#pragma unroll
    for (uint32_t i = 0; i < kBlock / 4; ++i) most = ptx::max_f32(most, counts(i) ? logit(i) : kLeast);
    for (uint32_t bits = 1; bits < 4; bits *= 2) most = ptx::max_f32(most, ptx::shfl_xor_sync(most, bits));
    const Powers powers(most, p.scale);
#pragma unroll
    for (uint32_t i = 0; i < kBlock / 4; ++i)
      sums[i / 2 % 4] = ptx::add_rn(sums[i / 2 % 4], counts(i) ? powers.of(logit(i)) : 0.f);
    float sum = ptx::add_rn(ptx::add_rn(sums[0], sums[1]), ptx::add_rn(sums[2], sums[3]));
    for (uint32_t bits = 1; bits < 4; bits *= 2) sum = ptx::add_rn(sum, ptx::shfl_xor_sync(sum, bits));
    return powers.log_of(sum);
  }
};
