// D = C + A @ B.T, FP8 operands with fine-grained scales, two-level accumulation. Persistent and warp-specialized:
//
//   producer, one thread      for each tile, for each k-block:   empty --wait--> TMA A, sfa, B --bytes--> full
//   math, 2 or 3 warpgroups   for each tile, for each k-block:   full --wait--> WGMMA, promote --arrive--> empty
//                             after the last k-block:            accumulators -> shared memory --TMA--> D
//
// A math warpgroup owns kBlockM / kNumMathWarpgroups rows of the tile and works through them in units of 64 x kUnitN:
// one or two units' partial sums are in the tensor cores' registers at a time, the totals of all units beside them.
//
// Where tiles are few, the kClusterK CTAs of a cluster share out a tile's k-blocks, and split.cuh adds up their totals.
// Where rows are grouped, a warp beside the producer's reads from the layout which tiles there are: see groups.cuh.
// Where groups are along k, each has a depth and tensor maps of its own: see k_groups.cuh.
#pragma once
#include "config.cuh"
#include "groups.cuh"
#include "k_scheduler.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"
#include "scaling.cuh"
#include "scheduler.cuh"
#include "split.cuh"
#include "store.cuh"
#include "tile_queue.cuh"

struct Params {
  ptx::TensorMap map_a, map_b, map_sfa, map_d;  // of A and B not where groups are along k
  union {
    ptx::TensorMap map_sfb;      // where B has a scale for each row, kSfbIsPerRow
    ptx::TensorMap map_whole_d;  // else, where rows are grouped: D, not cut off, for which TMA needs less time
  };
  const float* sfb;           // where it has one for each 128x128 block
  const uint8_t* c;
  uint8_t* d;                 // where k is split, and for padding between groups; else D is stored through its map
  uint64_t c_pitch, d_pitch;  // in elements
  uint32_t sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
  Groups groups;
};
#include "params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

// Operand tiles are rows of 128 bytes, swizzled in atoms of 8 rows: 1024 bytes, to which their addresses are aligned.
constexpr uint32_t kABytes = kBlockM * kBlockK, kBBytes = kBlockN * kBlockK;
// Of a slot: those of A's rows, those of B's. TMA writes to whole lines.
constexpr uint32_t kScalesLoaded = kScaleRows + (kSfbIsPerRow ? kBlockN : 0), kScales = ceil_div(kScalesLoaded, 32) * 32;
constexpr uint32_t kSlotBytes = kABytes + kBBytes + kScalesLoaded * 4;

constexpr uint32_t kAccumulators = kUnitsPerWarpgroup * kUnitN / 2;
constexpr uint32_t kOutputRoom = kClusterK > 1 ? exchange_floats(kAccumulators) * 4
                                               : kNumMathWarpgroups * kNumStoreBuffers * kStoreBufferBytes;

struct SharedStorage {
  alignas(1024) uint8_t output[kOutputRoom];  // store buffers, the same for each warpgroup, or the exchange of split.cuh
  alignas(1024) uint8_t a[kNumStages][kABytes];
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(128) float scales[kNumStages][kScales];
  Ring ring;
  // Of the exchange: all has come that is sent to this CTA; all CTAs have read what they were sent of the tile before.
  uint64_t received, consumed;
  TileQueue queue;  // of a grouped product
  NumberMail mail;  // of one along k
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "GemmConfig.shared_bytes and SharedStorage differ");

// How the loading thread, or a math warp, comes by the tiles of its CTA.
template <bool kIsWarp>
DEVICE bool next_tile(const Params& p, SharedStorage& shared, Scheduler& scheduler, uint32_t& taken, Tile& tile) {
  if constexpr (kGroups == kNoGroups && !kIsKGrouped) return scheduler.next(p.groups, tile);
  return next_of_queue<kIsWarp>(shared.queue, taken, tile);
}

// What one slot receives. Boxes of A and its scales have no more rows than A: to fill one row outside with zeros takes TMA
// about 2 ns. What lies in the slot behind them is multiplied, and not stored.
DEVICE uint32_t bytes_of_slot(const Params& p, const Tile& tile) {
  if constexpr (kGroups != kNoGroups)
    return kSlotBytes - (kBlockM - rows_loaded(tile)) * kBlockK - (tile.is_narrow ? kBlockN - kBoxRowsOfB : 0) * kBlockK;
  const uint32_t rows = (p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA) * kClusterN;
  const uint32_t scales = p.m < kBlockM ? ceil_div(p.m, 4) * 4 : kBlockM;  // 16 bytes are the least that TMA loads
  return kSlotBytes - (kBlockM - rows) * kBlockK - (kBlockM - scales) * 4;
}

// Each CTA of a cluster loads its part of the shared operand into the same slot of both: of A from this row on.
DEVICE uint32_t first_row_loaded() { return kClusterN > 1 ? ptx::cluster_rank() * kBoxRowsOfA : 0; }

// A box of A, or of its scales, for all CTAs of a cluster along n.
DEVICE void load_shared(const ptx::TensorMap* map, uint64_t* full, void* to, uint32_t x, uint32_t y) {
  if constexpr (kClusterN > 1)
    ptx::tma_load_2d_multicast(map, full, to, x, y, kAllCtas);
  else
    ptx::tma_load_2d(map, full, to, x, y);
}

// Loads the k-blocks of one tile, each into the next slot of the ring.
DEVICE void load_tile(const Params& p, SharedStorage& shared, const Tile& tile, RingPosition& at) {
  const KBlocks k_blocks(p.k);
  const uint32_t slot_bytes = bytes_of_slot(p, tile);
  for (uint32_t k_block = k_blocks.first; k_block < k_blocks.end; ++k_block, at = at.next()) {
    const uint32_t k = k_block * kBlockK;
    wait_until_free(shared.ring, at);
    uint64_t* full = &shared.ring.full[at.stage];
    ptx::mbarrier_arrive_expect_tx(full, slot_bytes);
    if constexpr (kGroups != kNoGroups) {
#pragma unroll
      for (uint32_t row = 0; row < kBlockM; row += kBoxRowsOfA) {
        if (row >= rows_loaded(tile)) break;
        const ClippedBox box(tile.row_m + row, tile.end_m, kBoxRowsOfA);
        ptx::tma_load_4d(&p.map_a, full, shared.a[at.stage] + row * kBlockK, k, box.first, box.place, plane_of(tile));
      }
#pragma unroll
      for (uint32_t row = 0; row < kBlockN; row += kBoxRowsOfB) {
        if (row > 0 && tile.is_narrow) break;
        ptx::tma_load_3d(&p.map_b, full, shared.b[at.stage] + row * kBlockK, k, tile.row_n + row, tile.group);
      }
      ptx::tma_load_3d(&p.map_sfa, full, shared.scales[at.stage], tile.row_m - skipped_scales(tile), k_block, plane_of(tile));
      if constexpr (kSfbIsPerRow)
        ptx::tma_load_3d(&p.map_sfb, full, shared.scales[at.stage] + kScaleRows, tile.row_n, k_block, tile.group);
      continue;
    }
    const uint32_t first_row = first_row_loaded();
    load_shared(&p.map_a, full, shared.a[at.stage] + first_row * kBlockK, k, tile.row_m + first_row);
    if constexpr (kClusterM > 1) {
      constexpr uint32_t kRows = kBlockN / kClusterM;
      const uint32_t first = ptx::cluster_rank() * kRows;
      ptx::tma_load_2d_multicast(&p.map_b, full, shared.b[at.stage] + first * kBlockK, k, tile.row_n + first, kAllCtas);
    } else {
      ptx::tma_load_2d(&p.map_b, full, shared.b[at.stage], k, tile.row_n);
    }
    ptx::tma_load_2d(&p.map_sfa, full, shared.scales[at.stage], tile.row_m, k_block);
    if constexpr (kSfbIsPerRow)
      ptx::tma_load_2d(&p.map_sfb, full, shared.scales[at.stage] + kScaleRows, tile.row_n, k_block);
    if constexpr (kAddsToD) prefetch_d(&p.map_d, Span(p.n), tile, k_block, k_blocks.end);
  }
}

// The same for one tile of a group along k. CTAs of a cluster are in one group, and load equally many k-blocks.
DEVICE void load_k_tile(const Params& p, SharedStorage& shared, const KTile& of_group, RingPosition& at) {
  const Tile& tile = of_group.tile;
  const uint32_t first_row = first_row_loaded(), row_m = tile.row_m + first_row;
  for (uint32_t k_block = 0; k_block < tile.num_k_blocks; ++k_block, at = at.next()) {
    wait_until_free(shared.ring, at);
    uint64_t* full = &shared.ring.full[at.stage];
    float* scales = shared.scales[at.stage];
    ptx::mbarrier_arrive_expect_tx(full, kSlotBytes);
    // Scales too are shared: that takes 0.5% of the cycles off at depth 2048.
    load_shared(&of_group.k_group->map_a, full, shared.a[at.stage] + first_row * kBlockK, k_block * kBlockK, row_m);
    load_shared(&p.map_sfa, full, scales + first_row, row_m, of_group.first_k_block + k_block);
    ptx::tma_load_2d(&of_group.k_group->map_b, full, shared.b[at.stage], k_block * kBlockK, tile.row_n);
    ptx::tma_load_2d(&p.map_sfb, full, scales + kScaleRows, tile.row_n, of_group.first_k_block + k_block);
    if constexpr (kAddsToD) prefetch_d(&p.map_d, Span(p.n), tile, k_block, tile.num_k_blocks);
  }
}

// Finds, deals and loads the tiles of a product of groups along k.
DEVICE void load_k_groups(const Params& p, SharedStorage& shared, RingPosition& at) {
  KScheduler scheduler(p.groups, p.m, p.n, shared.mail);
  KTile tile, coming;
  uint32_t dealt = 0;
  bool is_coming = scheduler.next(coming);
  while (is_coming) {
    tile = coming;
    if (kAddsToD && tile.tile.num_k_blocks == 0) break;  // nor has any other tile something to add
    deal<false>(shared.queue, dealt, tile.tile);
    is_coming = scheduler.next(coming);  // its maps are on their way while this one's operands are
    load_k_tile(p, shared, tile, at);
  }
  deal<false>(shared.queue, dealt, kNoMoreTiles);
}

// Multiplies one unit of one slot: 64 rows of A by kUnitN rows of B, 128 deep, from zero.
DEVICE void issue_unit(float (&partial)[kUnitN / 2], uint32_t a_low, uint32_t b_low) {
  ptx::wgmma_fence();
  ptx::wgmma_m64k128_e4m3<kUnitN>(partial, a_low, b_low);
  ptx::wgmma_commit_group();
}

// Of a warpgroup's units those that it has of a tile that is short, or narrow: its first ones.
constexpr bool kHasParts = kUnitsOfPart > 0;
constexpr uint32_t kFirstUnits = kHasParts ? kUnitsOfPart : kUnitsPerWarpgroup;
DEVICE float (&first_units_of(float (&total)[kUnitsPerWarpgroup][kUnitN / 2]))[kFirstUnits][kUnitN / 2] {
  return reinterpret_cast<float(&)[kFirstUnits][kUnitN / 2]>(total);
}

// What one math thread reads of the ring's slots, as it lies in the first: descriptors (their low words) of its
// warpgroup's first rows of A and of all of B, and the scales of its first row and column. The loop adds multiples of a
// slot. A tile's rows go round among the warpgroups, 64 at a time; the next of the same one are kUnitStride further.
struct Operands {
  uint32_t a, b;
  const float *sfa, *sfb;

  DEVICE Operands(const SharedStorage& shared, uint32_t warpgroup)
      : a(ptx::smem_descriptor_low(ptx::smem_address(shared.a[0]) + warpgroup * 64 * kBlockK)),
        b(ptx::smem_descriptor_low(ptx::smem_address(shared.b[0]))),
        sfa(&shared.scales[0][warpgroup * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4]),
        sfb(shared.scales[0] + kScaleRows + ptx::lane_index() % 4 * 2) {}
};

// Multiplies the next kCount k-blocks as they arrive, and promotes each into `total`. A piece is one unit of one k-block.
// Scales are loaded ahead of the WGMMAs: behind them the loads wait for the warp's own WGMMAs, and ptxas lets the next
// WGMMA wait for what needs them (up to 6% of a product's time on an H200). Where units keep scales of B by row, A's of all
// units come with those (3%); where each unit loads B's for itself they come behind, and A's with them: A's alone ahead
// cost 1%.
// With two sets of partial sums the tensor cores work on a piece while the one before is promoted. In a straight line
// only: ptxas serializes all WGMMAs of a loop whose accumulators are in flight where it turns back (note C7514).
template <uint32_t kCount, uint32_t kUnits>
DEVICE void multiply_k_blocks(Ring& ring, const Operands& operands, const BlockScales& block_scales,
                              uint32_t k_block_of_32, RingPosition& at, bool& is_loaded,
                              float (&total)[kUnits][kUnitN / 2]) {
  constexpr uint32_t kPieces = kCount * kUnits, kLag = kNumPartials - 1;
  RingPosition slots[kCount];
  float sfb[kCount][kScalesPerTile], sfa[kPieces][2], partial[kNumPartials][kUnitN / 2];
  ptx::Float2 kept[kCount][kKeepsRowScales ? kUnitN / 8 : 1];
#pragma unroll
  for (uint32_t i = 0; i < kPieces + kLag; ++i) {
    if (i < kPieces) {
      const uint32_t k_block = i / kUnits, unit = i % kUnits;
      const uint32_t row = unit / kUnitsAlongN * kUnitStride, column = unit % kUnitsAlongN * kUnitN;
      if (unit == 0) {
        slots[k_block] = at;
        if constexpr (!kSfbIsPerRow) block_scales.of_k_block(k_block_of_32 + k_block, sfb[k_block]);
        if (!is_loaded) wait_until_loaded(ring, at);
        if constexpr (kKeepsRowScales) {
          // Along k by address, not by pointer: ptxas needs three instructions less for these loads, with which a k-block
          // begins, and the product 1 to 1.5% fewer cycles. (Dense FP32 ones take 2% longer so.)
          const auto of_slot = [&](const float* scales, uint32_t index) {
            if constexpr (kIsKGrouped)
              return ptx::smem_address(scales) + (at.stage * kScales + index) * 4;
            else
              return scales + at.stage * kScales + index;
          };
#pragma unroll
          for (uint32_t pair = 0; pair < kUnitN; pair += 8)
            kept[k_block][pair / 8] = ptx::ld_shared_v2_f32(of_slot(operands.sfb, pair));
#pragma unroll
          for (uint32_t u = 0; u < kUnits; ++u) load_scales(of_slot(operands.sfa, u * kUnitStride), sfa[i + u]);
        }
      }
      const uint32_t stage = slots[k_block].stage;
      const float* scales_of_a = operands.sfa + stage * kScales + row;
      if constexpr (!kLoadsRowScalesLate && !kKeepsRowScales) load_scales(scales_of_a, sfa[i]);
      issue_unit(partial[i % kNumPartials], operands.a + stage * (kABytes / 16) + row * (kBlockK / 16),
                 operands.b + stage * (kBBytes / 16) + column * (kBlockK / 16));
      if constexpr (kLoadsRowScalesLate) load_scales(scales_of_a, sfa[i]);
      if (unit + 1 == kUnits) {
        // While the tensor cores work, ask for the next slot; one answer for the warp, which WGMMA needs converged.
        at = at.next();
        is_loaded = ptx::all_sync(ptx::mbarrier_test_wait_parity(&ring.full[at.stage], at.parity));
      }
    }
    if (i >= kLag) {
      const uint32_t done = i - kLag, k_block = done / kUnits, unit = done % kUnits;
      if (i < kPieces) ptx::wgmma_wait_group<kLag>(); else ptx::wgmma_wait_group<0>();
      const uint32_t column = unit % kUnitsAlongN * kUnitN;
      const bool is_last_of_slot = unit + 1 == kUnits;
      if constexpr (kLoadsRowScalesLate) {
        const float* scales = operands.sfb + slots[k_block].stage * kScales + column;
        const float last = promote_by_row(total[unit], partial[done % kNumPartials], sfa[done],
                                          [&](uint32_t pair) { return ptx::ld_shared_v2_f32(scales + pair); });
        if (is_last_of_slot) {
          ptx::syncwarp();  // all lanes have read their scales
          release(ring, slots[k_block], ptx::lane_index(), last);
        }
      } else {
        if (is_last_of_slot) release(ring, slots[k_block], ptx::lane_index(), sfa[done][1]);
        if constexpr (kKeepsRowScales)
          promote_by_row(total[unit], partial[done % kNumPartials], sfa[done],
                         [&](uint32_t pair) { return kept[k_block][pair / 8]; });
        else
          promote(total[unit], partial[done % kNumPartials], sfa[done], block_scales, sfb[k_block], column);
      }
    }
  }
}

// Multiplies `count` k-blocks: whole runs, and what they leave.
template <uint32_t kUnits>
DEVICE void multiply_runs(Ring& ring, const Operands& operands, const BlockScales& block_scales, uint32_t count,
                          RingPosition& at, bool& is_loaded, float (&total)[kUnits][kUnitN / 2]) {
  // Kept from the compiler, which would compute it anew for each turn of the loop.
  const uint32_t end_of_runs = ptx::opaque(count / kRunKBlocks * kRunKBlocks);
  uint32_t k_block = 0;
#pragma unroll 1
  for (; k_block != end_of_runs; k_block += kRunKBlocks)
    multiply_k_blocks<kRunKBlocks>(ring, operands, block_scales, k_block, at, is_loaded, total);
  if constexpr (kHasTail)
#pragma unroll 1
    for (; k_block < count; ++k_block)
      multiply_k_blocks<1>(ring, operands, block_scales, k_block, at, is_loaded, total);
}

DEVICE BlockScales scales_of_b(const Params& p, const Tile& tile) {
  const float* sfb = kGroups == kNoGroups ? p.sfb : p.sfb + tile.group * p.groups.sfb_stride;
  return BlockScales(sfb, p.sfb_stride_n, p.sfb_stride_k, tile.row_n, p.n, KBlocks(p.k).end);
}

// Asks for those that a tile's first k-blocks need.
DEVICE void begin_scales(const Params& p, const Tile& tile, float (&coming)[kScalesPerTile]) {
  if constexpr (kSfbIsPerRow) return;
  const KBlocks k_blocks(p.k);
  if (kClusterK > 1 && k_blocks.first == k_blocks.end) return;  // fewer runs than CTAs
  const BlockScales scales = scales_of_b(p, tile);
#pragma unroll
  for (uint32_t i = 0; i < kScalesPerTile; ++i) coming[i] = scales.load(i, k_blocks.first);
}

// Multiplies the k-blocks of one tile.
template <uint32_t kUnits>
DEVICE void multiply_tile(const Params& p, Ring& ring, Operands operands, const float (&first_scales)[kScalesPerTile],
                          const Tile& tile, RingPosition& at, float (&total)[kUnits][kUnitN / 2]) {
  const KBlocks k_blocks(kIsKGrouped ? tile.num_k_blocks * kBlockK : p.k);
#pragma unroll
  for (auto& unit : total)
#pragma unroll
    for (float& x : unit) x = 0;

  BlockScales block_scales = scales_of_b(p, tile);
  if constexpr (!kSfbIsPerRow)
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerTile; ++i) block_scales.coming[i] = first_scales[i];
  operands.sfa += skipped_scales(tile);
  bool is_loaded = false;  // known already that the slot at hand is
  // Scales by row come in no batches. One loop less is worth 1% to groups along k.
  if constexpr (kIsKGrouped) return multiply_runs(ring, operands, block_scales, k_blocks.end, at, is_loaded, total);
  for (uint32_t first = k_blocks.first; first < k_blocks.end; first += 32) {
    if constexpr (!kSfbIsPerRow) block_scales.advance(first);
    const uint32_t count = k_blocks.end - first < 32 ? k_blocks.end - first : 32;
    multiply_runs(ring, operands, block_scales, count, at, is_loaded, total);
  }
}

// Lets a tile's slots go, of which this warp needs nothing.
DEVICE void skip_tile(const Params& p, Ring& ring, RingPosition& at) {
  for (uint32_t k_block = 0; k_block < ceil_div(p.k, kBlockK); ++k_block, at = at.next()) {
    wait_until_loaded(ring, at);
    ptx::syncwarp();
    release(ring, at, ptx::lane_index());
  }
}

// Adds up what the CTAs of the cluster have of a tile, and writes this CTA's share of it to D. `parity` is that of the
// exchange, which takes a tile at a time.
DEVICE void store_sum(const Params& p, SharedStorage& shared, const Tile& tile, uint32_t& parity,
                      float (&total)[kUnitsPerWarpgroup][kUnitN / 2]) {
  constexpr uint32_t kShare = chunks_per_cta(kAccumulators), kQuadsPerUnit = kUnitN / 8;
  const uint32_t rank = ptx::cluster_rank(), warp = ptx::warp_index(), lane = ptx::lane_index();
  float* exchange = reinterpret_cast<float*>(shared.output);
  if (warp == 0 && lane == 0) expect_chunks<kAccumulators>(&shared.received, rank);  // some may have come already
  ptx::mbarrier_wait_parity(&shared.consumed, parity ^ 1);
  send_chunks(reinterpret_cast<float(&)[kAccumulators]>(total), exchange, &shared.received, rank, warp, lane);
  ptx::mbarrier_wait_parity_cluster(&shared.received, parity);
  parity ^= 1;
  for (uint32_t chunk_of_cta = warp; chunk_of_cta < kShare; chunk_of_cta += kNumMathWarps) {
    const uint32_t chunk = rank * kShare + chunk_of_cta;
    if (chunk >= chunks_of_tile(kAccumulators)) break;
    const uint32_t unit = chunk / kNumMathWarps / kQuadsPerUnit, quad = chunk / kNumMathWarps % kQuadsPerUnit;
    const uint32_t owner = chunk % kNumMathWarps;  // whose registers it was in
    const uint32_t row = owner / 4 * 64 + unit / kUnitsAlongN * kUnitStride + owner % 4 * 16;
    store_chunk(p.d, p.d_pitch, p.c, p.c_pitch, sum_chunk<kAccumulators>(exchange, chunk_of_cta, lane),
                tile.row_m + row, tile.row_n + unit % kUnitsAlongN * kUnitN + quad * 8, p.m, p.n, lane);
  }
  // The next tile's chunks may come once all warps of this CTA have read theirs.
  ptx::bar_sync(1, kNumMathWarps * 32);
  if (warp == 0 && lane < kClusterK) ptx::mbarrier_arrive_cluster(&shared.consumed, lane);
}

// Adds up, if k is split, and stores a warpgroup's part of a tile.
template <uint32_t kUnits>
DEVICE void store_total(const Params& p, SharedStorage& shared, const Tile& tile, uint32_t warpgroup, uint32_t& store_buffer,
                        uint32_t& parity, float (&total)[kUnits][kUnitN / 2]) {
  if constexpr (kClusterK > 1) return store_sum(p, shared, tile, parity, total);
  const uint32_t row_m = tile.row_m + warpgroup * 64;
  const uint8_t* c = kIsKGrouped ? p.c + tile.group * p.groups.c_stride * kOutputBytes : p.c;
  if constexpr (kWithC)
#pragma unroll  // `total` stays in registers only while its indices are known at compile time
    for (uint32_t unit = 0; unit < kUnits; ++unit)
      add_c(total[unit], c, p.c_pitch, row_m + unit / kUnitsAlongN * kUnitStride + ptx::warp_index() % 4 * 16,
            tile.row_n + unit % kUnitsAlongN * kUnitN, p.m, p.n, ptx::lane_index());
  uint8_t* buffers = shared.output + warpgroup * kNumStoreBuffers * kStoreBufferBytes;
  store_tile(&p.map_d, &p.map_whole_d, Span(p.n), buffers, store_buffer, total, tile, row_m, warpgroup);
}

KERNEL(kNumThreads, 1) fp8_gemm_kernel(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warpgroup = ptx::shfl_sync(ptx::thread_index() / 128, 0);  // uniform, which the compiler cannot see
  const bool is_producer = warpgroup == kNumMathWarpgroups;

  if (ptx::warp_index() == 0 && ptx::elect_sync()) {
    if constexpr (!kIsKGrouped) ptx::prefetch_tensormap(&p.map_a);
    if constexpr (!kIsKGrouped) ptx::prefetch_tensormap(&p.map_b);
    ptx::prefetch_tensormap(&p.map_sfa);
    if constexpr (kSfbIsPerRow) ptx::prefetch_tensormap(&p.map_sfb);
    if constexpr (kHasWholeD) ptx::prefetch_tensormap(&p.map_whole_d);
    if constexpr (kClusterK == 1) ptx::prefetch_tensormap(&p.map_d);
    if constexpr (kClusterK > 1) {
      ptx::mbarrier_init(&shared.received, 1);
      ptx::mbarrier_init(&shared.consumed, kClusterK);
    }
    if constexpr (kGroups != kNoGroups || kIsKGrouped) shared.queue.init();
    if constexpr (kIsKGrouped && kClusterSize > 1) shared.mail.init();
    shared.ring.init();
  }
  // No CTA may load into another's slots, or arrive at its barriers, before they are initialized.
  if constexpr (kClusterSize > 1) ptx::cluster_sync(); else ptx::syncthreads();

  // Launched as a dependent of the kernel before (set_pdl), this one has come so far beside it, and goes on after it.
  ptx::griddepcontrol_wait();

  Scheduler scheduler(p.m, p.n, shared.queue.window);
  RingPosition at;
  Tile tile;
  uint32_t tiles = 0;  // taken from, or put into, the queue
  // Before registers move: ptxas puts shuffles where lanes may have parted into code that both roles share, and that takes
  // registers which the producer's warps no longer have (an illegal instruction on an H200).
  const uint32_t warp = ptx::warp_index() % 4;
  if (is_producer) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (warp == 0 && ptx::elect_sync()) {
      if constexpr (kIsKGrouped)
        load_k_groups(p, shared, at);
      else
        while (next_tile<false>(p, shared, scheduler, tiles, tile)) load_tile(p, shared, tile, at);
      ptx::griddepcontrol_launch_dependents();
      // The other CTA still arrives at this one's barriers until its last slots are free.
      if constexpr (kMulticastCtas > 1)
        for (uint32_t i = 0; i < kNumStages; ++i, at = at.next()) wait_until_free(shared.ring, at);
    }
    if (kGroups != kNoGroups && warp == 1) {
      while (scheduler.next(p.groups, tile)) deal<true>(shared.queue, tiles, tile);
      deal<true>(shared.queue, tiles, kNoMoreTiles);
      if (p.groups.zeroes_padding) zero_padding(p.groups, p.d, p.d_pitch * kOutputBytes, p.n * kOutputBytes);
    }
  } else {
    ptx::setmaxnreg_inc<kMathRegisters>();
    const Operands operands(shared, warpgroup);
    uint32_t store_buffer = 0, parity = 0;
    float total[kUnitsPerWarpgroup][kUnitN / 2], first_scales[kScalesPerTile];
    bool has_total = false, is_part = false;
    while (true) {
      // The next tile is taken, and its first scales are asked for, before the totals of the last one are stored: the answer
      // would keep the first product waiting.
      if (kIsKGrouped && has_total) take<true>(shared.queue, tiles, tile);
      const Tile done = tile;
      const bool is_tile = next_tile<true>(p, shared, scheduler, tiles, tile);
      if (is_tile) begin_scales(p, tile, first_scales);
      if (has_total) {
        if (kHasParts && is_part)
          store_total(p, shared, done, warpgroup, store_buffer, parity, first_units_of(total));
        else
          store_total(p, shared, done, warpgroup, store_buffer, parity, total);
      }
      if (!is_tile) break;
      // One answer for the warp, or ptxas takes `at` for different in its lanes, and moves descriptors one by one.
      const auto ends_at = [&](uint32_t row) { return ptx::all_sync(tile.row_m + row >= tile.end_m); };
      has_total = !(kGroups != kNoGroups && kNumMathWarpgroups > 1 && ends_at(warpgroup * 64));
      if (!has_total) {
        skip_tile(p, shared.ring, at);
        continue;
      }
      if constexpr (kHasParts) is_part = kHasShortTiles ? ends_at(warpgroup * 64 + kUnitStride) : tile.is_narrow;
      if (kHasParts && is_part)
        multiply_tile(p, shared.ring, operands, first_scales, tile, at, first_units_of(total));
      else
        multiply_tile(p, shared.ring, operands, first_scales, tile, at, total);
    }
    if (ptx::warp_index() % 4 == 0 && ptx::lane_index() == 0) ptx::tma_store_wait_read<0>();
  }
  // A CTA whose tiles are done may still be told that another has consumed its chunks.
  if constexpr (kClusterK > 1) ptx::cluster_sync();
}
