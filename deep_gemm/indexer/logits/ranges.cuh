// The keys of tokens, and the blocks of keys that a tile needs. Producer, math warps and fill warps all use this code.
#pragma once
#include "config.cuh"
#include "logits/mqa_params.cuh"
#include "logits/tiles.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

static_assert(kTileTokens <= 32, "a lane for each token of a tile");
constexpr uint32_t kKeyAlignment = 32;  // blocks of a tile begin at multiples of this: no 16 bytes are split

DEVICE uint32_t num_tiles(const MqaParams& p) { return ceil_div(p.tokens, kTileTokens); }

// Keys begin..end - 1; none if begin equals end.
struct Range {
  uint32_t begin, end;

  DEVICE bool is_empty() const { return begin == end; }
};

// A token's range, cut off to 0..keys. A range that ends before it begins is empty.
DEVICE Range range_of(const MqaParams& p, uint32_t token) {
  if (token >= p.tokens) return {0, 0};
  const int32_t given_begin = ptx::ld_global_i32(p.starts + token), given_end = ptx::ld_global_i32(p.ends + token);
  const uint32_t begin = given_begin < 0 ? 0 : given_begin, most = given_end < 0 ? 0 : given_end;
  uint32_t end = most < p.keys ? most : p.keys;
  if (end <= begin) return {0, 0};
  if (kIsCompressed && end - begin > p.row_keys) end = begin + p.row_keys;
  return {begin, end};
}

// The blocks that a tile's tokens need, and the pieces to fill before and after these blocks.
struct TileKeys {
  uint32_t first, blocks;  // blocks of kBlockKeys from key `first` on

  DEVICE TileKeys(uint32_t lowest, uint32_t highest)
      : first(lowest < highest ? lowest / kKeyAlignment * kKeyAlignment : 0),
        blocks(lowest < highest ? ceil_div(highest - first, kBlockKeys) : 0) {}

  // A tile with blocks counts `cost_of_tile` steps more: the cost of beginning it.
  DEVICE uint32_t steps(uint32_t cost_of_tile) const { return blocks ? cost_of_tile + blocks : 0; }
  DEVICE uint32_t end() const { return first + blocks * kBlockKeys; }
  DEVICE uint32_t fills_before() const { return ceil_div(first, kFillKeys); }
  DEVICE uint32_t fills(const MqaParams& p) const {
    return kIsClean ? fills_before() + (p.keys > end() ? ceil_div(p.keys - end(), kFillKeys) : 0) : 0;
  }
};

// Computed by one thread.
DEVICE TileKeys tile_keys_of(const MqaParams& p, uint32_t tile) {
  uint32_t lowest = ~0u, highest = 0;
#pragma unroll
  for (uint32_t t = 0; t < kTileTokens; ++t) {
    const Range range = range_of(p, tile * kTileTokens + t);
    if (range.is_empty()) continue;
    lowest = range.begin < lowest ? range.begin : lowest;
    highest = range.end > highest ? range.end : highest;
  }
  return {lowest, highest};
}

// Computed by a warp; each lane has the range of one token.
DEVICE TileKeys tile_keys_of(const Range& of_lane) {
  const uint32_t lowest = ptx::reduce_min_sync(of_lane.is_empty() ? ~0u : of_lane.begin);
  const uint32_t highest = ~ptx::reduce_min_sync(~of_lane.end);
  return {lowest, highest};
}
