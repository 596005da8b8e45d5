// Tiles of tokens in shared memory, which the producer loads for the math warps, and the logits that math warps compute
// from a tile's blocks of keys. Both kernels of logits use this code; they find tokens and keys in different ways.
//
//   producer    q_empty --wait--> plan, weights, rows, TMA q --> q_full;     empty --wait--> TMA keys, scales --> full
//   math warps  q_full --wait--> blocks --arrive--> q_empty;   full --wait--> WGMMA, weigh, reduce --arrive--> empty; store
//
// A tile has kUnits units of kUnitTokens tokens. The heads of a unit's tokens are the columns of one WGMMA; 64 keys are
// its rows. A unit is reduced while the tensor cores multiply the next; a block of keys is loaded once for all units.
#pragma once
#include "config.cuh"
#include "logits/unit.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"

using Unit = LogitUnit<kUnitTokens, kHeads, kDepth>;
constexpr uint32_t kTileTokens = kUnits * kUnitTokens, kTileColumns = kTileTokens * kHeads;
constexpr uint32_t kTileSlots = 2;  // math warps compute one tile while the other is loaded
constexpr uint32_t kKeysBytes = kBlockKeys * kDepth, kSlotBytes = kKeysBytes + kBlockKeys * 4;
constexpr uint32_t kRowBytes = 16;  // size of a token's `Row`
// Whether a unit's logits are stored before the next product starts. Otherwise ptxas starts the product while 16
// tokens' sums occupy registers, and spills.
constexpr bool kStoresFirst = kUnitTokens == 16 && kDepth == 128 && kOutputBytes == 2;

// The part of a tile to compute: `blocks` blocks, the first from key `first` on; 0 blocks: no tile is left.
struct TilePlan {
  uint32_t first, blocks;
};

// Both kernels' `Shared` holds q, weights, rows and plans for each slot of a tile, and keys and scales for each stage.
// Its `Row` has the address of a token's logits and the token's keys; its `Position` is the slot of a tile.

// Called by one thread.
template <class Params, class Shared>
DEVICE void init_tiles(const Params& p, Shared& shared) {
  ptx::prefetch_tensormap(&p.map_q);
  ptx::prefetch_tensormap(&p.map_keys);
  ptx::prefetch_tensormap(&p.map_scales);
  for (uint32_t slot = 0; slot < kTileSlots; ++slot) {
    ptx::mbarrier_init(&shared.q_full[slot], 33);  // all lanes of the producer arrive, one of them twice
    ptx::mbarrier_init(&shared.q_empty[slot], kNumMathWarps);
  }
  shared.ring.init();
}

// Called by the producer's warp.
template <class Shared>
DEVICE void wait_for_slot(Shared& shared, const typename Shared::Position& at) {
  ptx::mbarrier_wait_parity(&shared.q_empty[at.slot()], at.parity() ^ 1);
  ptx::syncwarp();
}

// Producer, one thread: loads q for all units. The last unit may hold columns of later tokens, or zeros after the last
// token: logits of these columns are not stored.
template <class Params, class Shared>
DEVICE void load_q(const Params& p, Shared& shared, uint32_t slot, uint32_t first_token) {
  uint64_t* full = &shared.q_full[slot];
  ptx::mbarrier_arrive_expect_tx(full, kUnits * Unit::kBytes);
#pragma unroll
  for (uint32_t unit = 0; unit < kUnits; ++unit)
    ptx::tma_load_2d(&p.map_q, full, shared.q[slot][unit], 0, first_token * kHeads + unit * Unit::kColumns);
}

// Producer: stores the weights that a lane holds, of columns `first`, `first` + 32, ..., where math warps read them.
template <uint32_t kHeld>
DEVICE void lay_weights(float (&to)[kUnits][Unit::kWeights], const float (&held)[kHeld], uint32_t first) {
#pragma unroll
  for (uint32_t i = 0; i < kHeld; ++i) {
    const uint32_t column = first + i * 32;
    if (column < kTileColumns)
      ptx::st_shared_f32(&to[column / Unit::kColumns][place_of_weight(column % Unit::kColumns)], Unit::weight(held[i]));
  }
}

// Producer, one warp: tells the math warps that no tile is left.
template <class Shared>
DEVICE void end_tiles(Shared& shared, const typename Shared::Position& at, uint32_t lane) {
  wait_for_slot(shared, at);
  if (lane == 0) {
    ptx::st_shared_v2_b32(&shared.plans[at.slot()], 0, 0);
    ptx::mbarrier_arrive(&shared.q_full[at.slot()]);
  }
  ptx::mbarrier_arrive(&shared.q_full[at.slot()]);
}

// Stores a lane's logits of one key and one unit. `rows` is the address of the row of the lane's first token there.
template <class Row>
DEVICE void store_logits(uint32_t rows, uint32_t key, const float (&logits)[Unit::kLogits], float scale, uint32_t lane) {
  static_assert(sizeof(Row) == kRowBytes, "a row is read in one load");
#pragma unroll
  for (uint32_t i = 0; i < Unit::kLogits; ++i) {
    if (Unit::kTokens % 2 && token_of_lane(i, lane) >= Unit::kTokens) continue;
    const ptx::Uint4 row = ptx::ld_shared_v4_b32(rows + token_of_lane(i, kInPages ? lane : 0) * kRowBytes);
    const uint64_t address = static_cast<uint64_t>(row.y) << 32 | row.x;
    const bool has_key = Row::has(row, key);
    // If logits are clean, rows have space for whole blocks, so the last block needs no bound.
    if (kIsClean ? address == 0 : !has_key) continue;
    const float logit = kIsClean && !has_key ? ptx::float_of(0xff800000u) : logits[i] * scale;
    auto* to = reinterpret_cast<uint8_t*>(address + static_cast<uint64_t>(key) * kOutputBytes);
    if constexpr (kOutputBytes == 4) ptx::st_global_f32(to, logit);
    else ptx::st_global_b16(to, ptx::pack_bf16(logit, 0));
  }
}

// Addresses and weights that a math thread needs for a tile.
template <class Shared>
struct AtWork {
  Shared& shared;
  const WeightsInRegisters<Unit::kColumns> (&weights)[kUnits];
  uint32_t keys_low, q_low;  // descriptors' low words: of the warpgroup's keys in the first slot, of the tile's q
  uint32_t rows;             // address of the row of this lane's first token
  uint32_t row, lane;        // `row`: this thread's row in a block
  uint32_t step;             // keys from one block to the next
};

// Multiplies kBlocks blocks of keys, from key `key` on for this lane, and stores their logits. A piece is one unit of
// one block: while one piece is reduced, the tensor cores multiply the next. Only in a straight line of code that ends
// with all products done: ptxas serializes all WGMMAs of a loop if accumulators are in flight at its end (note C7514).
template <uint32_t kBlocks>
struct Run {
  static constexpr uint32_t kPieces = kBlocks * kUnits, kLag = kPieces > 1 ? 1 : 0;

  RingPosition slots[kBlocks];
  float scales[kBlocks];  // scales of this lane's keys
  Unit units[kLag + 1];

  // `is_loaded`: the slot at `at` is known to be full.
  template <uint32_t kPiece, class Shared>
  DEVICE void step(const AtWork<Shared>& work, uint32_t key, RingPosition& at, bool& is_loaded) {
    Ring& ring = work.shared.ring;
    if constexpr (kPiece < kPieces) {
      constexpr uint32_t kBlock = kPiece / kUnits, kUnit = kPiece % kUnits;
      if constexpr (kUnit == 0) {
        slots[kBlock] = at;
        if (kInPages || !is_loaded) wait_until_loaded(ring, at);
        if constexpr (kInPages) ptx::syncwarp();
        scales[kBlock] = ptx::ld_shared_f32(&work.shared.scales[at.stage][work.row]);
        if constexpr (kInPages) at = at.next();
      }
      units[kPiece % (kLag + 1)].multiply(work.keys_low + slots[kBlock].stage * (kKeysBytes / 16),
                                          work.q_low + kUnit * (Unit::kBytes / 16));
      if constexpr (kUnit + 1 == kUnits && !kInPages) {
        at = at.next();
        // While the tensor cores work, test the next slot; one result for the warp, because WGMMA needs it converged.
        is_loaded = ptx::all_sync(ptx::mbarrier_test_wait_parity(&ring.full[at.stage], at.parity));
      }
    }
    if constexpr (kPiece >= kLag) {
      constexpr uint32_t kDone = kPiece - kLag, kBlock = kDone / kUnits, kUnit = kDone % kUnits;
      constexpr uint32_t kInFlight = kPieces - 1 - kDone;
      ptx::wgmma_wait_group<kInFlight < kLag ? kInFlight : kLag>();
      if constexpr (kUnit + 1 == kUnits) release(ring, slots[kBlock], work.lane, scales[kBlock]);
      float logits[Unit::kLogits];
      units[kDone % (kLag + 1)].reduce(work.weights[kUnit], work.lane, logits);
      store_logits<typename Shared::Row>(work.rows + kUnit * kUnitTokens * kRowBytes, key + kBlock * work.step,
                                         logits, scales[kBlock], work.lane);
      if constexpr (kStoresFirst) ptx::syncwarp();
    }
    if constexpr (kPiece + 1 < kPieces + kLag) step<kPiece + 1>(work, key, at, is_loaded);
  }
};

// Math warps: compute all tiles of this CTA: every `splits`-th block, 64 of its keys for each warpgroup.
template <class Shared>
DEVICE void multiply_tiles(Shared& shared, uint32_t splits, uint32_t warpgroup, uint32_t warp, uint32_t lane) {
  const uint32_t keys_low = ptx::smem_descriptor_low(ptx::smem_address(shared.keys[0]) + warpgroup * 64 * kDepth);
  const uint32_t row = warpgroup * 64 + row_of_lane(warp, lane), step = splits * kBlockKeys;
  RingPosition at;
  bool is_loaded = false;
#pragma unroll 1
  for (typename Shared::Position slot_at;; slot_at = slot_at.next()) {
    ptx::mbarrier_wait_parity(&shared.q_full[slot_at.slot()], slot_at.parity());
    uint32_t key = ptx::ld_shared_b32(&shared.plans[slot_at.slot()].first) + row;
    uint32_t blocks = ptx::ld_shared_b32(&shared.plans[slot_at.slot()].blocks);
    if (blocks == 0) break;
    WeightsInRegisters<Unit::kColumns> weights[kUnits];
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; ++unit) weights[unit].load(shared.weights[slot_at.slot()][unit], lane);
    const uint32_t q_low = ptx::smem_descriptor_low(ptx::smem_address(shared.q[slot_at.slot()]));
    uint32_t rows = ptx::smem_address(shared.rows[slot_at.slot()]);
    if constexpr (!kInPages) rows += token_of_lane(0, lane) * kRowBytes;
    const AtWork<Shared> work = {shared, weights, keys_low, q_low, rows, row, lane, step};
#pragma unroll 1
    for (; blocks >= kRunBlocks; blocks -= kRunBlocks, key += kRunBlocks * step)
      Run<kRunBlocks>().template step<0>(work, key, at, is_loaded);
#pragma unroll 1
    for (; blocks; --blocks, key += step) Run<1>().template step<0>(work, key, at, is_loaded);
    // All lanes have read the tile's weights and rows.
    ptx::syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.q_empty[slot_at.slot()]);
  }
}
