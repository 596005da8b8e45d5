// Logits of the indexer for keys in pages: logits[b, t, j] = sf[j] * sum over heads h of max(0, q[b, t, h] . key[j]) *
// weights[b, t, h], for the keys j below the context of token t of sequence b. Persistent and warp-specialized:
//
//   producer, one warp     for each sequence:        q_empty --wait--> plan, weights, rows, TMA q --> q_full
//                          for each block of keys:   empty --wait--> TMA pages, scales --bytes--> full
//   math, 2 warpgroups     for each sequence:        q_full --wait--> blocks --arrive--> q_empty
//                          for each block:           full --wait--> WGMMA, weigh, reduce --arrive--> empty; store
//
// Memory is the limit: a CTA keeps the loads of 80 KB of keys in flight, and moves on to the next sequence without
// waiting. The keys of a sequence are loaded once for all its tokens, and are evicted from the L2 first. In the
// schedule of plan_paged_contexts a share runs from one (sequence, segment) to the next; a segment is a block of keys.
// If two CTAs have a share, each computes every other block. A tile of logits/tiles.cuh is a sequence.
#pragma once
#include "config.cuh"
#include "lanes.cuh"
#include "logits/tiles.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ring.cuh"

struct PagedParams {
  ptx::TensorMap map_q;       // E4M3 [sequences * next_n * heads, depth], boxes of a unit's columns
  ptx::TensorMap map_keys;    // E4M3 [blocks of the cache, page, depth], boxes of a page
  ptx::TensorMap map_scales;  // FP32 [blocks of the cache, page]
  const float* weights;       // [sequences * next_n, heads]
  const int32_t* contexts;    // [sequences, next_n], or [sequences] with contexts_step 0
  const int32_t* table;       // [sequences, pages]: blocks of the cache
  const int32_t* schedule;    // [shares + 1, 2]: the sequence and segment where a share begins
  uint8_t* logits;            // [sequences * next_n, ...] in rows of logits_pitch bytes
  uint64_t weights_pitch;     // in elements, like table_pitch
  uint64_t table_pitch;
  uint64_t logits_pitch;
  uint32_t sequences, cache_blocks;
  uint32_t contexts_pitch, contexts_step;  // in elements, from one sequence or token to the next
  uint32_t most_keys;                      // keys that fit both in rows of logits and in the table
  uint32_t splits;                         // CTAs of a share, 1 or 2
};
#include "paged_params_layout.cuh"  // asserts that the layout of PagedParams is what core/params.py packs

constexpr uint32_t kPages = kBlockKeys / kPage;
constexpr uint32_t kBlocksAhead = 2;  // loaded before the wait for a sequence's weights
static_assert(32 % kPages == 0, "a warp holds entries of whole blocks");
static_assert(kSegmentKeys == kBlockKeys, "a segment of the schedule is a block");

// The address of a token's logits, for keys 0..length - 1. The length is 0 for rows after the sequence's last token.
struct TokenRow {
  uint32_t address_low, address_high, length, unused;

  DEVICE static bool has(const ptx::Uint4& row, uint32_t key) { return key < row.z; }
};

// The slot of a sequence. Shared memory has two: math warps compute one sequence while the producer loads the other.
struct SlotPosition {
  uint32_t of_slot = 0, of_phase = 0;

  DEVICE uint32_t slot() const { return of_slot; }
  DEVICE uint32_t parity() const { return of_phase; }
  DEVICE SlotPosition next() const { return {of_slot ^ 1, of_phase ^ of_slot}; }
};

struct SharedStorage {
  using Position = SlotPosition;
  using Row = TokenRow;
  alignas(1024) uint8_t q[kTileSlots][kUnits][Unit::kBytes];
  alignas(1024) uint8_t keys[kNumStages][kKeysBytes];
  alignas(128) float scales[kNumStages][kBlockKeys];
  alignas(16) float weights[kTileSlots][kUnits][Unit::kWeights];
  alignas(16) TokenRow rows[kTileSlots][kTileTokens];
  TilePlan plans[kTileSlots];
  Ring ring;
  uint64_t q_full[kTileSlots], q_empty[kTileSlots];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "LogitsConfig.shared_bytes and SharedStorage differ");

// Counts a token's keys, up to `most_keys`; 0 if the context is negative.
DEVICE uint32_t keys_of_token(const PagedParams& p, uint32_t sequence, uint32_t token) {
  const int32_t given =
      ptx::ld_global_i32(p.contexts + static_cast<uint64_t>(sequence) * p.contexts_pitch + token * p.contexts_step);
  const uint32_t keys = given < 0 ? 0 : given;
  return keys < p.most_keys ? keys : p.most_keys;
}

// Counts the keys of the sequence's token that has the most.
DEVICE uint32_t keys_of_sequence(const PagedParams& p, uint32_t sequence) {
  uint32_t most = 0;
  if (sequence >= p.sequences) return 0;
#pragma unroll
  for (uint32_t token = 0; token < kNextN; ++token) {
    const uint32_t keys = keys_of_token(p, sequence, token);
    most = keys > most ? keys : most;
  }
  return most;
}

// Blocks of a share in one sequence: first, first + step, ... below end.
struct Blocks {
  uint32_t first, end, step;

  DEVICE uint32_t count() const { return first < end ? ceil_div(end - first, step) : 0; }
};

// Producer, one warp: loads q, weights and rows of a sequence. `ask` starts all loads, `finish` stores the loaded data
// for the math warps. The loads of the first pages start in between, because weights take as long to arrive as keys.
struct SequenceLoad {
  // If a column's token needs a division, loading more weights at once needs more registers than the producer has.
  static constexpr uint32_t kAll = ceil_div(kTileColumns, 32), kAtOnce = kHeads & (kHeads - 1) ? 2 : kAll;
  uint32_t sequence, keys;  // `keys`: the number of keys of this lane's token
  float weights[kAtOnce];

  DEVICE void ask_weights(const PagedParams& p, uint32_t first, uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      const uint32_t column = (first + i) * 32 + lane, token = column / kHeads;
      weights[i] = token < kNextN
                       ? ptx::ld_global_f32(p.weights + (sequence * kNextN + token) * p.weights_pitch + column % kHeads)
                       : 0;
    }
  }

  DEVICE void ask(const PagedParams& p, SharedStorage& shared, const SlotPosition& at, uint32_t sequence_,
                  const Blocks& blocks, uint32_t lane) {
    sequence = sequence_;
    if (lane == 0) {
      load_q(p, shared, at.slot(), sequence * kNextN);
      ptx::st_shared_v2_b32(&shared.plans[at.slot()], blocks.first * kBlockKeys, blocks.count());
    }
    ptx::syncwarp();
    keys = lane < kNextN ? keys_of_token(p, sequence, lane) : 0;
    ask_weights(p, 0, lane);
  }

  DEVICE void finish(const PagedParams& p, SharedStorage& shared, const SlotPosition& at, uint32_t lane) {
    if (lane < kTileTokens) {
      const uint64_t address = reinterpret_cast<uint64_t>(p.logits) + (sequence * kNextN + lane) * p.logits_pitch;
      ptx::st_shared_v4_b32(&shared.rows[at.slot()][lane], static_cast<uint32_t>(address),
                            static_cast<uint32_t>(address >> 32), keys, 0);
    }
    lay_weights(shared.weights[at.slot()], weights, lane);
#pragma unroll 1
    for (uint32_t first = kAtOnce; first < kAll; first += kAtOnce) {
      ask_weights(p, first, lane);
      lay_weights(shared.weights[at.slot()], weights, first * 32 + lane);
    }
    ptx::mbarrier_arrive(&shared.q_full[at.slot()]);
  }
};

// Producer, one warp: pages of a sequence's blocks. Each lane holds an entry of the table: of 32 / kPages blocks in all.
struct Entries {
  uint32_t held, page;

  // Loads entries for blocks from `first` on, up to the end of the table's row, so the contexts need not be known yet.
  DEVICE void load(const PagedParams& p, uint32_t sequence, uint32_t first, uint32_t step, uint32_t lane) {
    page = (first + lane / kPages * step) * kPages + lane % kPages;
    held = page * kPage < p.most_keys ? ptx::ld_global_b32(p.table + sequence * p.table_pitch + page) : p.cache_blocks;
  }

  // Replaces the entry of a page without keys by a block that the cache does not have: TMA fills its box with zeros.
  DEVICE void cut(const PagedParams& p, uint32_t keys) { held = page * kPage < keys ? held : p.cache_blocks; }
};

// Loads blocks whose entries are held, from entry `held` to `end` - 1. Entry 0 belongs to the sequence's block `first`.
DEVICE void load_blocks(const PagedParams& p, SharedStorage& shared, const Blocks& blocks, uint32_t& held, uint32_t end,
                        const Entries& entries, uint32_t first, RingPosition& at, uint32_t lane) {
#pragma unroll 1
  for (; held < end && first + held * blocks.step < blocks.end; ++held, at = at.next()) {
    wait_until_free(shared.ring, at);
    ptx::syncwarp();
    const uint32_t entry = ptx::shfl_sync(entries.held, held * kPages + lane % kPages);
    uint64_t* full = &shared.ring.full[at.stage];
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, kSlotBytes);
    ptx::syncwarp();
    if (lane < kPages) {
      ptx::tma_load_3d_evict_first(&p.map_keys, full, shared.keys[at.stage] + lane * (kPage * kDepth), 0, 0, entry);
      ptx::tma_load_2d_evict_first(&p.map_scales, full, shared.scales[at.stage] + lane * kPage, 0, entry);
    }
    ptx::syncwarp();
  }
}

// The sequences and segments where this CTA's share begins and ends, by the schedule. For up to 32 sequences the warp
// computes the share itself: it needs the contexts anyway, and saves one wait for memory.
struct Share {
  ptx::Uint2 begin, end;
  uint32_t keys;  // keys of the sequence whose index is this lane's, if the share is computed

  DEVICE static bool is_computed(const PagedParams& p) { return p.sequences <= 32; }

  DEVICE void find(const PagedParams& p, uint32_t lane) {
    const uint32_t share = ptx::block_index() / p.splits, shares = ptx::grid_size() / p.splits;
    if (!is_computed(p)) {
      begin = ptx::ld_global_v2_b32(p.schedule + share * 2), end = ptx::ld_global_v2_b32(p.schedule + share * 2 + 2);
      return;
    }
    keys = keys_of_sequence(p, lane);
    const uint32_t segments = ceil_div(keys, kSegmentKeys);
    const uint32_t sum = sum_up_to_lane(segments, lane);  // segments of the sequences up to this lane's
    // If the segments do not divide evenly, the first shares get one more. (The schedule's formula would need 64 bits.)
    const uint32_t total = ptx::shfl_sync(sum, 31), each = total / shares, longer = total - each * shares;
    const uint32_t first = share * each + (share < longer ? share : longer);
    begin = place(first, sum, segments);
    end = place(first + each + (share < longer), sum, segments);
  }

 private:
  // Returns the sequence and segment of the line's segment `number`. After the last: sequence 32, which is none.
  DEVICE static ptx::Uint2 place(uint32_t number, uint32_t sum, uint32_t segments) {
    const uint32_t sequence = ptx::popc(ptx::ballot_sync(sum <= number));
    return {sequence, number - ptx::shfl_sync(sum - segments, sequence)};
  }
};

// An idle warp prefetches the table to the L2, one line for each lane, as far as the lanes of all CTAs reach: the
// producer waits twice for entries of the table.
DEVICE void prefetch_table(const PagedParams& p, uint32_t lane) {
  constexpr uint32_t kLineEntries = 32;
  const uint64_t entry = static_cast<uint64_t>(ptx::block_index() * 32 + lane) * kLineEntries;
  if (entry < p.sequences * p.table_pitch) ptx::prefetch_l2(p.table + entry);
}

// Producer, one warp: loads the sequences of the CTA's share.
DEVICE void load_share(const PagedParams& p, SharedStorage& shared, const Share& share, uint32_t lane) {
  const ptx::Uint2 begin = share.begin, end = share.end;
  const uint32_t half = ptx::block_index() % p.splits;
  RingPosition at;
  SlotPosition slot_at;
  // Starts to load the first sequence's entries while contexts are being loaded.
  Entries entries;
  if (begin.x < p.sequences) entries.load(p, begin.x, begin.y + half, p.splits, lane);
  // Lanes check 32 sequences at a time, because a padded batch has sequences without keys.
  const bool is_computed = Share::is_computed(p);
#pragma unroll 1
  for (uint32_t window = is_computed ? 0 : begin.x; window <= end.x && window < p.sequences; window += 32) {
    const uint32_t sequence_of_lane = window + lane;
    uint32_t keys_of_lane = 0;
    if (begin.x <= sequence_of_lane && sequence_of_lane <= end.x)
      keys_of_lane = is_computed ? share.keys : keys_of_sequence(p, sequence_of_lane);
#pragma unroll 1
    for (uint32_t left = ptx::ballot_sync(keys_of_lane != 0); left; left &= left - 1) {
      const uint32_t in_window = ptx::popc((left & (0 - left)) - 1);  // the lowest sequence left
      const uint32_t sequence = window + in_window, keys = ptx::shfl_sync(keys_of_lane, in_window);
      const uint32_t first_segment = sequence == begin.x ? begin.y : 0, all = ceil_div(keys, kBlockKeys);
      Blocks blocks = {first_segment + half, all, p.splits};
      if (sequence == end.x && end.y < all) blocks.end = end.y;
      if (blocks.count() == 0) continue;
      if (sequence != begin.x) entries.load(p, sequence, blocks.first, blocks.step, lane);
      wait_for_slot(shared, slot_at);
      SequenceLoad load;
      load.ask(p, shared, slot_at, sequence, blocks, lane);
      entries.cut(p, keys);
      uint32_t first = blocks.first, held = 0;
      load_blocks(p, shared, blocks, held, kBlocksAhead, entries, first, at, lane);
      load.finish(p, shared, slot_at, lane);
      slot_at = slot_at.next();
      const uint32_t step = 32 / kPages * blocks.step;
#pragma unroll 1
      while (true) {
        Entries next;
        const bool is_more = first + step < blocks.end;
        if (is_more) next.load(p, sequence, first + step, blocks.step, lane);
        load_blocks(p, shared, blocks, held, 32 / kPages, entries, first, at, lane);
        if (!is_more) break;
        entries = next;
        entries.cut(p, keys);
        first += step, held = 0;
      }
    }
  }
  end_tiles(shared, slot_at, lane);
}

KERNEL(kNumThreads, 1) fp8_paged_mqa_logits(GRID_CONSTANT PagedParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warpgroup = ptx::shfl_sync(ptx::thread_index() / 128, 0);
  const uint32_t warp = ptx::warp_index() % 4, lane = ptx::lane_index();
  if (ptx::warp_index() == 0 && ptx::elect_sync()) init_tiles(p, shared);
  ptx::griddepcontrol_wait();
  Share share = {};
  // These loads are in flight while barriers are initialized.
  if (ptx::warp_index() == kNumMathWarps) share.find(p, lane);
  if (ptx::warp_index() == kNumMathWarps + 1) prefetch_table(p, lane);
  ptx::syncthreads();

  if (warpgroup == kNumMathWarpgroups) {
    if constexpr (kProducerRegisters != 0) ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0) {
      load_share(p, shared, share, lane);
      ptx::griddepcontrol_launch_dependents();
    }
  } else {
    if constexpr (kProducerRegisters != 0) ptx::setmaxnreg_inc<kMathRegisters>();
    multiply_tiles(shared, p.splits, warpgroup, warp, lane);
  }
}
