// Divides the blocks of keys among the CTAs. The steps of all tiles form one line, which is divided into equal,
// contiguous shares. A tile's steps are its blocks, after extra steps for the cost of beginning the tile.
//
// Each CTA finds its share alone, in one pass over the ranges. Equal shares balance causal ranges as well as full ones,
// and few tokens with many keys occupy all SMs. Each logit is computed by one CTA, always in the same way. Pieces of
// rows to be filled with -inf form a second line, which is divided in the same way.
#pragma once
#include "config.cuh"
#include "lanes.cuh"
#include "logits/ranges.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

constexpr uint32_t kNumWarps = kNumThreads / 32, kSteps = 0, kFills = 1;

// Cost of beginning a tile, in blocks: a CTA waits for ranges, then for weights and queries. If there are no more tiles
// than CTAs, the cost is left out, because each CTA then begins one or two tiles anyway.
constexpr uint32_t kStepsOfBeginning = 1;

DEVICE uint32_t cost_of_tile(const MqaParams& p) { return num_tiles(p) > ptx::grid_size() ? kStepsOfBeginning : 0; }

struct ShareStorage {
  uint32_t of_warps[2][kNumWarps];
  uint32_t starts[2][2];  // tile, number of the step in the tile
};

// One CTA's share of a line: the tile where the share begins, the number of its first step in this tile, and its steps.
struct WorkShare {
  uint32_t tile, number, count;
};

// Finds this CTA's shares: shares[kSteps] and, if rows are cleaned, shares[kFills]. All threads call it, before roles begin.
DEVICE void find_shares(const MqaParams& p, ShareStorage& shared, WorkShare (&shares)[2]) {
  constexpr uint32_t kLines = kIsClean ? 2 : 1;
  const uint32_t thread = ptx::thread_index(), lane = ptx::lane_index(), warp = ptx::warp_index();
  const uint32_t tiles = num_tiles(p), per_thread = ceil_div(tiles, kNumThreads);
  const uint32_t cost = cost_of_tile(p);
  const uint32_t first = thread * per_thread, end = first + per_thread < tiles ? first + per_thread : tiles;
  uint32_t counts[2] = {0, 0}, before[2];
#pragma unroll 1
  for (uint32_t tile = first; tile < end; ++tile) {
    const TileKeys keys = tile_keys_of(p, tile);
    counts[kSteps] += keys.steps(cost);
    counts[kFills] += keys.fills(p);
  }
  ptx::syncwarp();
#pragma unroll
  for (uint32_t line = 0; line < kLines; ++line) {
    before[line] = sum_up_to_lane(counts[line], lane) - counts[line];
    if (lane == 31) ptx::st_shared_b32(&shared.of_warps[line][warp], before[line] + counts[line]);
  }
  ptx::syncthreads();
#pragma unroll
  for (uint32_t line = 0; line < kLines; ++line) {
    uint32_t total = 0;
#pragma unroll
    for (uint32_t other = 0; other < kNumWarps; ++other) {
      if (other == warp) before[line] += total;
      total += ptx::ld_shared_b32(&shared.of_warps[line][other]);
    }
    const uint64_t grid = ptx::grid_size(), cta = ptx::block_index();
    const auto begin = static_cast<uint32_t>(total * cta / grid);
    shares[line].count = static_cast<uint32_t>(total * (cta + 1) / grid) - begin;
    // The thread whose tiles contain the start of this CTA's share stores the tile and the number.
    if (begin - before[line] < counts[line]) {
      uint32_t tile = first, number = begin - before[line];
      while (tile + 1 < end) {
        const TileKeys keys = tile_keys_of(p, tile);
        const uint32_t count = line == kSteps ? keys.steps(cost) : keys.fills(p);
        if (number < count) break;
        number -= count;
        ++tile;
      }
      ptx::st_shared_b32(&shared.starts[line][0], tile);
      ptx::st_shared_b32(&shared.starts[line][1], number);
    }
  }
  ptx::syncthreads();
#pragma unroll
  for (uint32_t line = 0; line < kLines; ++line) {
    shares[line].tile = ptx::ld_shared_b32(&shared.starts[line][0]);
    shares[line].number = ptx::ld_shared_b32(&shared.starts[line][1]);
  }
}
