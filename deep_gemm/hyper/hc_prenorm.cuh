// D = A @ B.T and the sums of squares of A's rows, for A in BF16 and a B of few rows in FP32, rounded to TF32. Memory
// is the limit: A is read once, so all SMs must load at once, and many bytes at a time.
//
//   producer, one thread   for each k-block:    empty --wait--> TMA A, B --bytes--> full
//   teams of 4 or 8 warps  for each k-block     full --wait--> B: FP32 -> BF16 high and low, in place; WGMMA, and
//                          of the team:         squares of A beside it --arrive--> empty
//                          after the last:      high + low, squares --all teams of a cluster--> sums -> D, sqr_sum
//
// A k-block is a chain of latencies, so teams multiply k-blocks in turn: while one team waits, the others work.
//
// A TF32 number has 11 significant bits, so it is exactly the sum of two BF16 numbers, and the BF16 products of A with
// both add up to the TF32 product. A stays BF16. A team's barrier orders its writes of B before the products that read
// B. `empty` orders these products before the next load into the slot. `received` and `taken` guard a cluster's sums:
// each CTA adds up a share of them, always in the same order.
//
// A unit of work is a tile of D for one of the caller's splits of k. CTAs of a cluster divide the unit's k-blocks.
#pragma once
#include "config.cuh"
#include "exchange.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"

struct HcParams {
  ptx::TensorMap map_a, map_b;  // boxes of A have no more rows than A
  float* d;
  float* sqr_sum;
  uint64_t d_pitch, d_stride;  // in elements, from one row to the next and from one split to the next
  uint32_t m, k_blocks, splits;
  uint32_t tiles_n;  // kBlockN rows of B each
  uint32_t units;
  uint32_t slot_bytes;  // bytes of a box of A and one of B
};
#include "hc_params_layout.cuh"  // asserts that the layout of HcParams is what core/params.py packs

// A k-block is 64 deep. A row of A has 128 bytes. B's 256 bytes of a row become two rows of 128 bytes, high and low.
constexpr uint32_t kBlockK = 64, kRowBytes = 128;
constexpr uint32_t kABytes = kBlockM * kRowBytes, kBBytes = 2 * kBlockN * kRowBytes;
// kNumMathWarps: math warps of a team, 16 rows each.
constexpr uint32_t kTeamThreads = kNumMathWarps * 32, kTeamWarps = kTeams * kNumMathWarps, kProducerWarp = kTeamWarps;
constexpr uint32_t kSenders = kClusterK * kTeams;
static_assert(kNumMathWarps * 16 == kBlockM, "a team has all rows of a tile");
// In each round of the ring a team has the same stages, so it sees all phases of their barriers.
static_assert(kNumStages % kTeams == 0, "a team has stages of its own");
// Sums of a thread: for 2 rows and kBlockN / 4 columns, and the squares of both rows in a quad of their own.
constexpr uint32_t kSums = kBlockN / 2 + 4, kColumnQuads = kBlockN / 8;

struct SharedStorage {
  alignas(1024) uint8_t a[kNumStages][kABytes];  // rows past the box are not written, and their sums not stored
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(128) float exchange[exchange_floats(kSums, kSenders)];
  Ring ring;
  uint64_t received, taken;  // barriers of `exchange`
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "HcConfig.shared_bytes and SharedStorage differ");

// This CTA's part of a unit. Units are ordered by column, row and split: consecutive units share rows of A, or else B.
struct Unit {
  uint32_t row_m, row_n, split, k_block, end_k_block;

  DEVICE Unit(const HcParams& p, uint32_t unit, uint32_t rank) {
    const uint32_t tiles_m = ceil_div(p.m, kBlockM), tile = unit / p.tiles_n;
    row_n = unit % p.tiles_n * kBlockN;
    row_m = tile % tiles_m * kBlockM;
    split = tile / tiles_m;
    const Part of_split(p.k_blocks, p.splits, split);
    const Part of_rank(of_split.count, kClusterK, rank);
    k_block = of_split.first + of_rank.first;
    end_k_block = k_block + of_rank.count;
  }

  // All teams take the same number of turns; a last turn may have no k-block. So a team's k-blocks of a unit do
  // not depend on earlier units.
  DEVICE uint32_t turns_end() const { return k_block + ceil_div(end_k_block - k_block, kTeams) * kTeams; }
};

// The units of this CTA's cluster: `first`, and every `step`-th unit after it.
struct Units {
  uint32_t rank, first, step;

  DEVICE Units() {
    rank = kClusterK > 1 ? ptx::cluster_rank() : 0;
    first = ptx::block_index() / kClusterK, step = ptx::grid_size() / kClusterK;
  }
};

DEVICE void load(const HcParams& p, SharedStorage& shared, const Units& units) {
  RingPosition at;
#pragma unroll 1
  for (uint32_t i = units.first; i < p.units; i += units.step) {
    const Unit unit(p, i, units.rank);
#pragma unroll 1
    for (uint32_t k_block = unit.k_block; k_block < unit.turns_end(); ++k_block, at = at.next()) {
      uint64_t* full = &shared.ring.full[at.stage];
      wait_until_free(shared.ring, at);
      if (k_block >= unit.end_k_block) {
        ptx::mbarrier_arrive(full);
        continue;
      }
      ptx::mbarrier_arrive_expect_tx(full, p.slot_bytes);
      ptx::tma_load_2d(&p.map_b, full, shared.b[at.stage], k_block * kBlockK, unit.row_n);
      ptx::tma_load_2d(&p.map_a, full, shared.a[at.stage], k_block * kBlockK, unit.row_m);
    }
  }
}

// An FP32 number rounded to TF32 (nearest even), as the sum of two BF16 numbers: the upper halves of `high` and `low`.
// `high` is the next BF16 number towards zero, never the number itself. So both have its sign, and neither is zero:
// zero times an infinity of A would be a NaN. An infinity becomes the largest number and an infinity. A NaN remains a
// NaN in `low`, which is a difference. A number below 2^-123 loses its bits below 2^-133.
struct Parts {
  uint32_t high, low;

  DEVICE explicit Parts(uint32_t bits) {
    const uint32_t nearest = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    const uint32_t rounded = ptx::float_of(bits) == ptx::float_of(bits) ? nearest : bits;
    const float value = ptx::float_of(rounded);
    high = (value == 0 ? rounded : rounded - 1) & 0xffff0000u;
    low = ptx::bits_of(value - ptx::float_of(high));
  }
};

DEVICE uint32_t upper_halves(uint32_t first, uint32_t second) { return first >> 16 | (second & 0xffff0000u); }

// Splits a k-block of B in place: row i becomes rows 2 i, high, and 2 i + 1, low, of BF16, swizzled as TMA swizzles 128
// bytes. A team's warps divide the pairs of rows, 16 lanes a row; a warp loads all its pairs before it writes one.
DEVICE void split_slot(uint8_t* b, uint32_t warp, uint32_t lane) {
  constexpr uint32_t kPairs = kBlockN / 2, kSteps = ceil_div(kPairs, kNumMathWarps);
  ptx::Uint4 held[kSteps];
#pragma unroll
  for (uint32_t i = 0; i < kSteps; ++i) {
    const uint32_t pair = i * kNumMathWarps + warp;
    if (kPairs % kNumMathWarps == 0 || pair < kPairs) held[i] = ptx::ld_shared_v4_b32(b + pair * 512 + lane * 16);
  }
  ptx::syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < kSteps; ++i) {
    const uint32_t pair = i * kNumMathWarps + warp;
    if (kPairs % kNumMathWarps != 0 && pair >= kPairs) continue;
    const uint32_t row = (pair * 2 + lane / 16) * 2, column = lane % 16;  // of 4 elements, 8 bytes
    const Parts x(held[i].x), y(held[i].y), z(held[i].z), w(held[i].w);
    uint8_t* high = b + row * kRowBytes + (column / 2 ^ row % 8) * 16 + column % 2 * 8;
    uint8_t* low = b + (row + 1) * kRowBytes + (column / 2 ^ (row + 1) % 8) * 16 + column % 2 * 8;
    ptx::st_shared_v2_b32(high, upper_halves(x.high, y.high), upper_halves(z.high, w.high));
    ptx::st_shared_v2_b32(low, upper_halves(x.low, y.low), upper_halves(z.low, w.low));
  }
}

// Sums of squares of the two rows, 8 apart, that a lane has in the accumulators. The lane adds 2 chunks of 8 columns of
// each row; the 4 lanes of its quad add all 8 chunks. The first chunk alternates from row to row, so that lanes meet no
// bank conflict.
struct Squares {
  float sums[2][2] = {};

  DEVICE static uint32_t offset(uint32_t lane) {
    const uint32_t row = lane / 4;
    return row * kRowBytes + (lane % 4 ^ row ^ (row & 1) * 4) * 16;
  }

  // Returns the last value that it loads.
  DEVICE float add(uint32_t address) {
    ptx::Uint4 chunk;
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row)
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        chunk = ptx::ld_shared_v4_b32((address + row * 8 * kRowBytes) ^ i * 64);
        const uint32_t pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          const ptx::Float2 v = ptx::unpack_bf16(pairs[j]);
          sums[row][i] = ptx::fma_rn(v.x, v.x, sums[row][i]);
          sums[row][i] = ptx::fma_rn(v.y, v.y, sums[row][i]);
        }
      }
    return ptx::float_of(chunk.w);
  }

  DEVICE float of_row(uint32_t row, uint32_t lane) const {
    float sum = sums[row][0] + sums[row][1];
    sum += ptx::shfl_sync(sum, lane ^ 1);
    return sum + ptx::shfl_sync(sum, lane ^ 2);
  }
};

// A team's position in the ring. A team has every kTeams-th stage.
struct TeamPosition {
  uint32_t stage, parity = 0;

  DEVICE explicit TeamPosition(uint32_t team) : stage(team) {}
  DEVICE void next() {
    const bool wraps = stage + kTeams >= kNumStages;
    stage = wraps ? stage + kTeams - kNumStages : stage + kTeams, parity ^= static_cast<uint32_t>(wraps);
  }
};

// Multiplies a team's k-blocks of a unit. A thread's accumulator 4 g + i is for row lane / 4 + i / 2 * 8 of its warp's
// 16 and row 4 g + lane % 4 of B: its high part if i is even, else its low part. (PTX ISA, "Register Fragments for
// wgmma.mma_async.m64nNk16".) Sum 4 g + i is for row lane / 4 + i % 2 * 8 and column 8 g + i / 2 * 4 + lane % 4.
DEVICE void multiply(SharedStorage& shared, const Unit& unit, TeamPosition& at, uint32_t team, uint32_t warp,
                     uint32_t lane, float (&sums)[kSums]) {
  const uint32_t a_low = ptx::smem_descriptor_low(ptx::smem_address(shared.a[0]) + warp / 4 * 64 * kRowBytes);
  const uint32_t b_low = ptx::smem_descriptor_low(ptx::smem_address(shared.b[0]));
  const uint32_t rows = ptx::smem_address(shared.a[0]) + warp * 16 * kRowBytes + Squares::offset(lane);
  float products[kBlockN];
#pragma unroll
  for (float& x : products) x = 0;
  Squares squares;
#pragma unroll 1
  for (uint32_t k_block = unit.k_block + team; k_block < unit.turns_end(); k_block += kTeams, at.next()) {
    const RingPosition slot = {at.stage, at.parity};
    wait_until_loaded(shared.ring, slot);
    if (k_block >= unit.end_k_block) {
      ptx::syncwarp();  // all lanes have seen this phase, which the release may end
      release(shared.ring, slot, lane);
      continue;
    }
    split_slot(shared.b[at.stage], warp, lane);
    ptx::fence_proxy_async_shared();  // the tensor cores read what this thread wrote
    ptx::bar_sync(1 + team, kTeamThreads);
    ptx::fence_registers(products);
    ptx::wgmma_fence();
    ptx::wgmma_m64k64_bf16<2 * kBlockN>(products, a_low + at.stage * (kABytes / 16), b_low + at.stage * (kBBytes / 16),
                                        true);
    ptx::wgmma_commit_group();
    const float loaded = squares.add(rows + at.stage * kABytes);  // while the tensor cores work
    ptx::fence_registers(products);
    ptx::wgmma_wait_group<0>();
    release(shared.ring, slot, lane, loaded);
  }
#pragma unroll
  for (uint32_t i = 0; i < kBlockN / 2; ++i) sums[i] = products[i * 2] + products[i * 2 + 1];
  sums[kBlockN / 2] = squares.of_row(0, lane), sums[kBlockN / 2 + 1] = squares.of_row(1, lane);
  sums[kBlockN / 2 + 2] = sums[kBlockN / 2 + 3] = 0;
}

// Stores four sums of each lane of a warp: the warp's quad number `quad`.
DEVICE void store_quad(const HcParams& p, const Unit& unit, uint32_t quad, uint32_t warp, uint32_t lane, float x, float y,
                       float z, float w) {
  const uint32_t row = unit.row_m + warp * 16 + lane / 4;
  const bool has_row = row < p.m, has_next = row + 8 < p.m;
  if (quad == kColumnQuads) {
    float* to = p.sqr_sum + static_cast<uint64_t>(unit.split) * p.m + row;
    const bool is_mine = unit.row_n == 0 && lane % 4 == 0;
    if (is_mine && has_row) ptx::st_global_f32(to, x);
    if (is_mine && has_next) ptx::st_global_f32(to + 8, y);
    return;
  }
  float* to = p.d + unit.split * p.d_stride + row * p.d_pitch + unit.row_n + quad * 8 + lane % 4;
  float* next = to + 8 * p.d_pitch;
  if (has_row) ptx::st_global_f32(to, x), ptx::st_global_f32(to + 4, z);
  if (has_next) ptx::st_global_f32(next, y), ptx::st_global_f32(next + 4, w);
}

// Adds up the cluster's sums of the unit, in the order of CTAs and teams; each CTA stores a share.
DEVICE void add_up_and_store(const HcParams& p, SharedStorage& shared, const Unit& unit, const Units& units,
                             uint32_t number, bool is_last, uint32_t team, uint32_t warp, uint32_t lane,
                             const float (&sums)[kSums]) {
  constexpr uint32_t kShare = chunks_per_cta(kSums);
  // Before it sends, wait until all CTAs have read the sums of the previous unit.
  if (kClusterK > 1 && number > 0) ptx::mbarrier_wait_parity_cluster(&shared.taken, (number & 1) ^ 1);
  send_chunks(sums, shared.exchange, &shared.received, units.rank * kTeams + team, 0, warp, lane);
  if constexpr (kClusterK > 1)
    ptx::mbarrier_wait_parity_cluster(&shared.received, number & 1);
  else
    ptx::bar_sync(kTeams + 1, kTeamWarps * 32);
#pragma unroll 1
  for (uint32_t i = team * kNumMathWarps + warp; i < kShare; i += kTeamWarps) {
    const uint32_t chunk = units.rank * kShare + i;
    if (chunk >= chunks_of_tile(kSums)) break;
    const ptx::Float4 sum = sum_chunk<kSums, kSenders>(shared.exchange, i, lane);
    store_quad(p, unit, chunk / kNumMathWarps, chunk % kNumMathWarps, lane, sum.x, sum.y, sum.z, sum.w);
  }
  if (is_last) return;  // no CTA waits for `taken` any more, and an arrival might reach a CTA that has exited
  ptx::bar_sync(kTeams + 1, kTeamWarps * 32);
  if (kClusterK > 1 && ptx::thread_index() == 0) {
    expect_chunks<kSums, kSenders>(&shared.received, units.rank);
#pragma unroll 1
    for (uint32_t rank = 0; rank < kClusterK; ++rank) ptx::mbarrier_arrive_cluster(&shared.taken, rank);
  }
}

DEVICE void multiply_units(const HcParams& p, SharedStorage& shared, const Units& units, uint32_t team, uint32_t warp,
                           uint32_t lane) {
  TeamPosition at(team);
  uint32_t number = 0;
#pragma unroll 1
  for (uint32_t i = units.first; i < p.units; i += units.step, ++number) {
    const Unit unit(p, i, units.rank);
    float sums[kSums];
    multiply(shared, unit, at, team, warp, lane, sums);
    const bool is_last = i + units.step >= p.units;
    if (is_last) ptx::griddepcontrol_launch_dependents();
    if (kClusterK > 1 && number == 0) ptx::cluster_wait();  // all CTAs run, so they may be written to
    add_up_and_store(p, shared, unit, units, number, is_last, team, warp, lane, sums);
  }
}

KERNEL(kNumThreads, 1) tf32_hc_prenorm_gemm(GRID_CONSTANT HcParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index();
  const Units units;
  if (warp == kProducerWarp && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_a);
    ptx::prefetch_tensormap(&p.map_b);
    ptx::mbarrier_init(&shared.received, 1);
    ptx::mbarrier_init(&shared.taken, kClusterK);
    shared.ring.init();
    if constexpr (kClusterK > 1) expect_chunks<kSums, kSenders>(&shared.received, units.rank);
  }
  ptx::syncthreads();
  if constexpr (kClusterK > 1) ptx::cluster_arrive_relaxed();  // this CTA runs, so others may write to it

  if (warp < kTeamWarps) {
    ptx::griddepcontrol_wait();
    multiply_units(p, shared, units, warp / kNumMathWarps, warp % kNumMathWarps, lane);
    return;
  }
  if (ptx::elect_sync()) {
    ptx::griddepcontrol_wait();
    load(p, shared, units);
  }
  ptx::syncwarp();
  if constexpr (kClusterK > 1) ptx::cluster_wait();
}
