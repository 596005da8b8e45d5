// Logits of the indexer: logits[i, j] = sf[j] * sum over heads h of max(0, q[i, h] . key[j]) * weights[i, h], for the
// keys j of token i's range. Persistent and warp-specialized:
//
//   producer, one warp     for each tile of tokens:   q_empty --wait--> plan, weights, rows, TMA q --> q_full
//                          for each block of keys:    empty --wait--> TMA keys, scales --bytes--> full
//   math, 2 warpgroups     for each tile:             q_full --wait--> blocks --arrive--> q_empty
//                          for each block:            full --wait--> WGMMA, weigh, reduce --arrive--> empty; store
//   fill, three warps      store -inf where no block of keys has logits, while the other warps work
//
// logits/tiles.cuh has the tiles and the code of the math warps.
#pragma once
#include "config.cuh"
#include "logits/mqa_params.cuh"
#include "logits/ranges.cuh"
#include "logits/shares.cuh"
#include "logits/tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"

// Weights that a lane loads at once. If a column's token needs a division, the producer lacks registers for more.
constexpr uint32_t kWeightsAtOnce = kHeads <= 64 && (kHeads & (kHeads - 1)) == 0 ? 8 : 2;
constexpr uint32_t kInfinity = kOutputBytes == 4 ? 0xff800000u : 0xff80ff80u;  // -inf: one of FP32, two of BF16

// The address of a token's logits. `begin` and `length` are the token's range of keys.
struct TokenRow {
  uint32_t address_low, address_high;  // address for key 0's logit; 0: no such token
  uint32_t begin, length;

  DEVICE static bool has(const ptx::Uint4& row, uint32_t key) { return key - row.z < row.w; }
};

// The slot of a tile. Shared memory has two: math warps compute one tile while the producer loads the other.
struct TilePosition {
  uint32_t count = 0;  // the number of earlier tiles

  DEVICE uint32_t slot() const { return count % kTileSlots; }
  DEVICE uint32_t parity() const { return count / kTileSlots % 2; }
  DEVICE TilePosition next() const { return {count + 1}; }
};

struct SharedStorage {
  using Position = TilePosition;
  using Row = TokenRow;
  alignas(1024) uint8_t q[kTileSlots][kUnits][Unit::kBytes];
  alignas(1024) uint8_t keys[kNumStages][kKeysBytes];
  alignas(128) float scales[kNumStages][kBlockKeys];
  alignas(16) float weights[kTileSlots][kUnits][Unit::kWeights];
  alignas(16) TokenRow rows[kTileSlots][kTileTokens];
  TilePlan plans[kTileSlots];
  Ring ring;
  uint64_t q_full[kTileSlots], q_empty[kTileSlots];
  ShareStorage shares;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "LogitsConfig.shared_bytes and SharedStorage differ");

DEVICE uint64_t row_address(const MqaParams& p, uint32_t token) {
  return reinterpret_cast<uint64_t>(p.logits) + token * p.logits_pitch;
}

// Producer, one thread: loads a tile's blocks of keys from `block` on. Without kMayWait it stops at a slot in use.
template <bool kMayWait>
DEVICE void load_blocks(const MqaParams& p, SharedStorage& shared, const TilePlan& plan, uint32_t& block,
                        RingPosition& at) {
#pragma unroll 1
  for (; block < plan.blocks; ++block, at = at.next()) {
    if (kMayWait)
      wait_until_free(shared.ring, at);
    else if (!ptx::mbarrier_test_wait_parity(&shared.ring.empty[at.stage], at.parity ^ 1))
      break;
    const uint32_t key = plan.first + block * kBlockKeys;
    uint64_t* full = &shared.ring.full[at.stage];
    ptx::mbarrier_arrive_expect_tx(full, kSlotBytes);
    ptx::tma_load_2d(&p.map_keys, full, shared.keys[at.stage], 0, key);
    ptx::tma_load_2d(&p.map_scales, full, shared.scales[at.stage], key, 0);
  }
}

// Producer: each lane loads kWeightsAtOnce of a tile's weights, of columns `first`, `first` + 32, ...
DEVICE void load_weights(const MqaParams& p, uint32_t first_token, uint32_t first, float (&held)[kWeightsAtOnce]) {
#pragma unroll
  for (uint32_t i = 0; i < kWeightsAtOnce; ++i) {
    const uint32_t column = first + i * 32, token = first_token + column / kHeads;
    held[i] = column < kTileColumns && token < p.tokens
                  ? ptx::ld_global_f32(p.weights + token * p.weights_pitch + column % kHeads)
                  : 0;
  }
}

// Producer, one warp: loads a tile's rows (first, which frees their registers), q, plan, weights and blocks of keys. It
// starts all loads before it waits for any: with few tokens a kernel spends most of its time waiting for these loads.
DEVICE void load_tile(const MqaParams& p, SharedStorage& shared, const TilePosition& at, uint32_t tile,
                      const Range& of_lane, const TilePlan& plan, RingPosition& ring_at, uint32_t lane) {
  const uint32_t first_token = tile * kTileTokens;
  uint64_t* full = &shared.q_full[at.slot()];
  uint32_t block = 0;
  if (lane < kTileTokens) {
    const uint32_t token = first_token + lane;
    uint64_t address = row_address(p, token);
    if (kIsCompressed) address -= static_cast<uint64_t>(of_lane.begin) * kOutputBytes;
    if (token >= p.tokens) address = 0;
    ptx::st_shared_v4_b32(&shared.rows[at.slot()][lane], static_cast<uint32_t>(address),
                          static_cast<uint32_t>(address >> 32), of_lane.begin, of_lane.end - of_lane.begin);
  }
  float weights[kWeightsAtOnce];
  load_weights(p, first_token, lane, weights);
  if (lane == 0) {
    load_q(p, shared, at.slot(), first_token);
    load_blocks<false>(p, shared, plan, block, ring_at);
    ptx::st_shared_v2_b32(&shared.plans[at.slot()], plan.first, plan.blocks);
  }
  ptx::syncwarp();
  lay_weights(shared.weights[at.slot()], weights, lane);
#pragma unroll 1
  for (uint32_t first = lane + kWeightsAtOnce * 32; first < kTileColumns; first += kWeightsAtOnce * 32) {
    load_weights(p, first_token, first, weights);
    lay_weights(shared.weights[at.slot()], weights, first);
  }
  ptx::mbarrier_arrive(full);
  if (lane == 0) load_blocks<true>(p, shared, plan, block, ring_at);
  ptx::syncwarp();
}

// Returns the number of a tile's blocks before a step of the tile.
DEVICE uint32_t block_of_step(uint32_t step, uint32_t cost) { return step < cost ? 0 : step - cost; }

// Producer, one warp: loads all tiles of the CTA's share.
DEVICE void load_share(const MqaParams& p, SharedStorage& shared, WorkShare share, uint32_t lane) {
  const uint32_t cost = cost_of_tile(p);
  RingPosition at;
  TilePosition tile_at;
#pragma unroll 1
  for (; share.count; ++share.tile, share.number = 0) {
    const Range of_lane = lane < kTileTokens ? range_of(p, share.tile * kTileTokens + lane) : Range{0, 0};
    const TileKeys keys = tile_keys_of(of_lane);
    const uint32_t left = keys.steps(cost) - share.number, taken = left < share.count ? left : share.count;
    share.count -= taken;
    const uint32_t first = block_of_step(share.number, cost), blocks = block_of_step(share.number + taken, cost) - first;
    if (blocks == 0) continue;
    const TilePlan plan = {keys.first + first * kBlockKeys, blocks};
    wait_for_slot(shared, tile_at);
    load_tile(p, shared, tile_at, share.tile, of_lane, plan, at, lane);
    tile_at = tile_at.next();
  }
  end_tiles(shared, tile_at, lane);
}

// Fill, several warps: store -inf in the pieces of rows that no block covers.
DEVICE void fill_share(const MqaParams& p, WorkShare share, uint32_t warp, uint32_t lane) {
  constexpr uint32_t kOfStore = 16 / kOutputBytes;
  static_assert(kKeyAlignment % kOfStore == 0 && kFillKeys % (32 * kOfStore) == 0, "whole stores");
#pragma unroll 1
  for (; share.count; ++share.tile, share.number = 0) {
    const Range of_lane = lane < kTileTokens ? range_of(p, share.tile * kTileTokens + lane) : Range{0, 0};
    const TileKeys keys = tile_keys_of(of_lane);
    const uint32_t fills = keys.fills(p), before = keys.fills_before();
    const uint32_t last = fills - share.number < share.count ? fills : share.number + share.count;
    const uint32_t first_token = share.tile * kTileTokens;
    const uint32_t tokens = p.tokens - first_token < kTileTokens ? p.tokens - first_token : kTileTokens;
#pragma unroll 1
    for (uint32_t piece = share.number + warp; piece < last; piece += kFillWarps) {
      const bool is_before = piece < before;
      const uint32_t key = is_before ? piece * kFillKeys : keys.end() + (piece - before) * kFillKeys;
      const uint32_t end = is_before && keys.first - key < kFillKeys ? keys.first : key + kFillKeys;
      uint8_t* row = reinterpret_cast<uint8_t*>(row_address(p, first_token));
#pragma unroll 1
      for (uint32_t token = 0; token < tokens; ++token, row += p.logits_pitch)
#pragma unroll
        for (uint32_t i = 0; i < kFillKeys; i += 32 * kOfStore) {
          const uint32_t at = key + i + lane * kOfStore;
          if (at < end)
            ptx::st_global_v4_b32(row + static_cast<uint64_t>(at) * kOutputBytes, kInfinity, kInfinity, kInfinity,
                                  kInfinity);
        }
    }
    share.count -= last - share.number;
  }
}

// One thread, while ranges are being loaded: prefetches to the L2 the q and keys that this CTA needs if there is a
// single tile, whose range is all keys. A wrong guess costs nothing.
DEVICE void prefetch_likely(const MqaParams& p) {
  constexpr uint32_t kMostBlocks = 4;
  if (num_tiles(p) > 1) return;
  const uint64_t blocks = ceil_div(p.keys, kBlockKeys);
  const auto first = static_cast<uint32_t>(blocks * ptx::block_index() / ptx::grid_size());
  const auto end = static_cast<uint32_t>(blocks * (ptx::block_index() + 1) / ptx::grid_size());
  if (first == end) return;
  for (uint32_t unit = 0; unit < kUnits; ++unit) ptx::tma_prefetch_2d(&p.map_q, 0, unit * Unit::kColumns);
  for (uint32_t block = first; block < end && block < first + kMostBlocks; ++block) {
    ptx::tma_prefetch_2d(&p.map_keys, 0, block * kBlockKeys);
    ptx::tma_prefetch_2d(&p.map_scales, block * kBlockKeys, 0);
  }
}

KERNEL(kNumThreads, 1) fp8_mqa_logits(GRID_CONSTANT MqaParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warpgroup = ptx::shfl_sync(ptx::thread_index() / 128, 0);
  const uint32_t warp = ptx::warp_index() % 4, lane = ptx::lane_index();
  if (ptx::warp_index() == 0 && ptx::elect_sync()) init_tiles(p, shared);
  ptx::griddepcontrol_wait();
  if (ptx::warp_index() == kNumMathWarps && ptx::elect_sync()) prefetch_likely(p);
  WorkShare shares[2];
  find_shares(p, shared.shares, shares);  // has a barrier for the block; after it, mbarriers may be used

  if (warpgroup == kNumMathWarpgroups) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      load_share(p, shared, shares[kSteps], lane);
      ptx::griddepcontrol_launch_dependents();
    } else if (kIsClean) {
      fill_share(p, shares[kFills], warp - 1, lane);
    }
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    multiply_tiles(shared, 1, warpgroup, warp, lane);
  }
}
