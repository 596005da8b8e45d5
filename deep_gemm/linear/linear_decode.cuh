// D = C + cast(x) @ B.T for few rows of BF16: the tokens of a decode step. CTAs cast the rows that they multiply, and share this
// work with the CTAs of their cluster that multiply the same rows. The result has the bits of cast_rows followed by
// fp8_gemm_decode.
//
//   producer, one thread         for each k-block:           empty --wait--> TMA B --bytes--> full
//   casters, 8 warps             for whole rows, first:      x -> registers -> largest magnitude of a token's part of a row
//                                                            --bytes--> amaxes and amaxes_full of each CTA of the cluster
//                                for each group of k-blocks: x -> registers -> largest magnitude of a token's 128 columns
//                                                            a_empty of all --wait--> sfa * sfb, FP8 values --bytes-->
//                                                            a and a_full of each CTA that multiplies them
//   math, 1 or 2 warpgroups      for each group of k-blocks: a_full --wait-->
//                                  for each of its k-blocks: full --wait--> WGMMA, promote --arrive--> empty
//                                                            --arrive--> a_empty of each CTA that casts for this CTA
//                                after the last k-block:     accumulators --cluster--> sums -> transposed -> D
//
// A cluster is kClusterN adjacent tiles times kClusterK parts of k. CTAs with the same part of k need the same A: each casts every
// kClusterN-th block of A for all. Shared memory holds two groups of A: one group is cast while the other is multiplied.
// While the first group is cast, the ring fills with B, which takes longer to arrive. decode/tile.cuh defines a CTA's share of the
// work, the loop over k-blocks, and the stores to D. kWholeRows: each whole row of A and of B has one scale. Then a cluster reads
// x twice: to find the largest magnitudes, and to cast it. Totals are scaled after the last k-block.
#pragma once
#include "cast/fp8.cuh"
#include "config.cuh"
#include "decode/tile.cuh"
#include "factors.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

struct LinearParams {
  ptx::TensorMap map_b;  // a box has at most B's number of rows
  const uint8_t* x;
  const float* sfb;
  uint8_t* d;
  const uint8_t* c;
  uint64_t d_pitch, c_pitch;  // in elements; c_pitch is 0 for a bias
  uint32_t x_pitch;           // in bytes; 32 bits, so that one instruction computes an address
  uint32_t sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
  uint32_t slot_bytes;  // bytes of one box of B
};
DEVICE uint32_t column_of_d(const LinearParams&, uint32_t column) { return column; }
#include "linear_params_layout.cuh"  // asserts the layout that core/params.py packs

// Threads are ordered by role: math warps, producer, casters.
constexpr uint32_t kFirstCaster = kNumMathThreads + 32, kCasters = kNumThreads - kFirstCaster;
// Named barrier 2 joins the casters and the producer; named barrier 1 joins the math warps.
constexpr uint32_t kXIsOnItsWay = 2;

// A block is 128 columns of a token. A team of kLanes casters casts kBlocksOfTeam blocks of a group.
constexpr uint32_t kCastTeams = kCasters / kLanes;
constexpr uint32_t kGroupBlocks = kBlocksOfTeam * kCastTeams * kClusterN;
constexpr uint32_t kGroupKBlocks = kGroupBlocks / kBlockTokens;
static_assert(kGroupKBlocks * kBlockTokens == kGroupBlocks, "a group is whole k-blocks of all tokens");
static_assert(kElements * kLanes == kBlock && kBlock == kBlockK, "a team's lanes hold a block");
static_assert(kBlocksOfTeam * kClusterN <= kLanes, "a lane for each scale and each CTA that it goes to");
constexpr uint32_t kClusterSize = kClusterN * kClusterK;
static_assert(kClusterSize > 1, "st.async wants a cluster");
constexpr uint32_t kBlocksAtOnce = 4;  // blocks that a team loads before it waits, while it searches a row

// Buffers for groups of A. Group i uses buffer i % 2, for the (i / 2)-th time.
constexpr uint32_t kRooms = 2;

struct SharedStorage {
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(1024) uint8_t a[kRooms][kGroupKBlocks][kABytes];  // rows past the last token are never written
  alignas(128) float exchange[kClusterK > 1 ? exchange_floats(kAccumulators) : 4];
  union {
    float scales[kRooms][kGroupKBlocks * kBlockTokens];  // sfa * sfb: [k-block][token]
    float amaxes[kClusterSize][kCastTeams];              // kWholeRows: largest magnitudes that the teams of each CTA have found
  };
  Ring ring;
  uint64_t received;  // arrivals of data in `exchange`
  uint64_t a_full[kRooms], a_empty[kRooms], amaxes_full;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "LinearDecodeConfig.shared_bytes and SharedStorage differ");
static_assert(kClusterK > 1 || sizeof(SharedStorage::b) >= kBlockTokens * kBlockN * 4, "the ring must hold a tile");

// Returns the rank in the cluster of the CTA at `place` along n, with this CTA's part of k.
DEVICE uint32_t rank_at(const Work& work, uint32_t place) { return place * kClusterK + work.rank; }

// Tells whether this CTA has a tile. A CTA without a tile only casts for other CTAs of its cluster.
DEVICE bool has_tile(const LinearParams& p, const Work& work) { return work.row_n < p.n; }

// Loads this CTA's k-blocks of B into successive slots of the ring.
DEVICE void load_k_blocks(const LinearParams& p, SharedStorage& shared, const Work& work) {
  RingPosition at;
  for (uint32_t i = work.k_block; i < work.end_k_block; ++i, at = at.next()) {
    uint64_t* full = &shared.ring.full[at.stage];
    wait_until_free(shared.ring, at);
    ptx::mbarrier_arrive_expect_tx(full, p.slot_bytes);
    ptx::tma_load_2d(&p.map_b, full, shared.b[at.stage], i * kBlockK, work.row_n);
  }
}

// Consecutive k-blocks of all tokens: `count` from `k_block` on. Their blocks are numbered token by token.
struct Group {
  uint32_t k_block, count, num_blocks;
  uint32_t reciprocal;  // 2^20 / count, rounded up

  DEVICE Group(const LinearParams& p, const Work& work, uint32_t first)
      : k_block(first),
        count(work.end_k_block - first < kGroupKBlocks ? work.end_k_block - first : kGroupKBlocks),
        num_blocks(p.m * count),
        reciprocal(((1 << 20) + count - 1) / count) {}

  // Returns the bytes of the FP8 values and of the blocks' scales.
  DEVICE uint32_t bytes() const { return num_blocks * (kBlock + (kWholeRows ? 0 : 4)); }
};

// One of a group's blocks: number i of this thread's team.
struct Place {
  uint32_t block, token, k_block;  // counted from the group's first

  DEVICE Place(const Group& group, const Work& work, uint32_t i) {
    block = (i * kCastTeams + (ptx::thread_index() - kFirstCaster) / kLanes) * kClusterN + work.place;
    token = block * group.reciprocal >> 20;  // exact for such small numbers
    k_block = block - token * group.count;
  }
  DEVICE bool is_there(const Group& group) const { return block < group.num_blocks; }
};
static_assert(kGroupBlocks <= 1024, "the quotients of Place are exact");

// Returns the offset of a lane's 8 columns in a k-block of A: rows of 128 bytes, with 16-byte chunks swizzled like TMA's.
DEVICE uint32_t offset_in_a(uint32_t token, uint32_t lane) {
  return token * kBlockK + ((lane / 2 ^ token % 8) * 16 + lane % 2 * 8);
}

// Loads a lane's columns of a block; zeros past k, and for an absent block. It avoids ".nc" loads, which the compiler may move
// before griddepcontrol_wait.
DEVICE void load_block(Piece& to, const LinearParams& p, bool is_there, uint32_t token, uint32_t k_block, uint32_t lane) {
  const uint32_t column = k_block * kBlockK + lane * kElements;
  to = {};
  if (!is_there || column >= p.k) return;
  const uint8_t* row = p.x + static_cast<uint64_t>(token) * p.x_pitch;
  const ptx::Uint4 loaded = ptx::ld_global_v4_b32(row + column * kInputBytes);
  to = {loaded.x, loaded.y, loaded.z, loaded.w};
}

// A thread's part of its team's blocks, before the cast.
struct Pieces {
  Piece held[kBlocksOfTeam];
  float sfb;  // B's scale for the block whose scale this lane sends (lane kBlocksOfTeam * place + block)

  // Issues all loads before the first is used.
  DEVICE void load(const LinearParams& p, const Work& work, const Group& group, uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kBlocksOfTeam; ++i) {
      const Place at(group, work, i);
      load_block(held[i], p, at.is_there(group), at.token, group.k_block + at.k_block, lane);
    }
    if constexpr (kWholeRows) return;
    const Place at(group, work, lane % kBlocksOfTeam);
    const uint32_t k_block = group.k_block + (at.is_there(group) ? at.k_block : 0);
    const uint32_t row_n = work.row_n + (lane / kBlocksOfTeam - work.place) * kBlockN;
    sfb = ptx::ld_global_f32(p.sfb + static_cast<uint64_t>((row_n < p.n ? row_n : p.n - 1) / 128) * p.sfb_stride_n +
                             static_cast<uint64_t>(k_block) * p.sfb_stride_k);
  }

  // Sends values, and scales of blocks. With kIsOrdinary, if a block is not ordinary (`is_ordinary`), returns false and
  // sends nothing. A lane holds the scale of one block (with kWholeRows, of a token), computed from the largest magnitude.
  template <bool kIsOrdinary>
  DEVICE bool cast(SharedStorage& shared, const Work& work, const Group& group, uint32_t room, uint32_t lane, float amax) const {
    if constexpr (!kWholeRows) {
      uint32_t keys[kBlocksOfTeam];
#pragma unroll
      for (uint32_t i = 0; i < kBlocksOfTeam; ++i) keys[i] = key_of<kIsOrdinary>(held[i]);
      amax = amax_of(largest_of_team(keys, lane));
    }
    const Divisor of_lane = divisor_of<kIsOrdinary>(amax, 0.f, false);
    if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return false;

    const uint32_t first_of_team = ptx::lane_index() / kLanes * kLanes;
    uint64_t* full = &shared.a_full[room];
#pragma unroll
    for (uint32_t i = 0; i < kBlocksOfTeam; ++i) {
      const Place at(group, work, i);
      const uint32_t from = kWholeRows ? at.token % kBlockTokens : first_of_team + i;
      const Divisor divisor = {ptx::shfl_sync(of_lane.scale, from), ptx::shfl_sync(of_lane.reciprocal, from)};
      if (!at.is_there(group)) continue;
      float quotients[kElements];
#pragma unroll
      for (uint32_t e = 0; e < kElements; ++e) quotients[e] = quotient_of<kIsOrdinary>(element_of(held[i], e), divisor);
      const Values values = pack_values(quotients);
      uint8_t* to = shared.a[room][at.k_block] + offset_in_a(at.token, lane);
#pragma unroll
      for (uint32_t place = 0; place < kClusterN; ++place)
        ptx::st_async_v2_b32(to, full, rank_at(work, place), values.words[0], values.words[1]);
    }
    if constexpr (kWholeRows) return true;
    const Place at(group, work, lane % kBlocksOfTeam);
    const uint32_t place = lane / kBlocksOfTeam;
    if (place < kClusterN && at.is_there(group))
      ptx::st_async_b32(&shared.scales[room][at.k_block * kBlockTokens + at.token], full, rank_at(work, place),
                        ptx::bits_of(of_lane.scale * sfb));
    return true;
  }
};

// Team t searches the row of token t % num_sought. num_sought is a power of two.
DEVICE uint32_t num_sought(const LinearParams& p) { return p.m > 8 ? 16 : p.m > 4 ? 8 : p.m > 2 ? 4 : p.m; }
static_assert(kBlockTokens <= kCastTeams && kCastTeams == 16, "a team for each token");

// Sends the largest magnitudes of this CTA's share of x to all CTAs of the cluster. With one token the CTA also casts that share.
// An infinity may count as the largest magnitude: its row becomes NaN with any scale.
DEVICE void search_rows(const LinearParams& p, SharedStorage& shared, const Work& work, uint32_t lane) {
  const uint32_t team = (ptx::thread_index() - kFirstCaster) / kLanes, tokens = num_sought(p), teams = kCastTeams / tokens;
  uint32_t keys[1] = {0};
#pragma unroll 1
  for (uint32_t first = work.k_block, next; first < work.end_k_block; first = next) {
    next = first + kBlocksAtOnce * teams * kClusterN;
    Piece held[kBlocksAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kBlocksAtOnce; ++i) {
      const uint32_t k_block = first + (i * teams + team / tokens) * kClusterN + work.place;
      load_block(held[i], p, team % tokens < p.m && k_block < work.end_k_block, team % tokens, k_block, lane);
    }
    if (next >= work.end_k_block) ptx::bar_arrive(kXIsOnItsWay, kCasters + 32);
#pragma unroll
    for (const Piece& piece : held) keys[0] = larger_key(keys[0], key_of<true>(piece));
  }
  const float amax = amax_of(largest_of_team(keys, lane));
  ptx::cluster_wait();  // all CTAs of the cluster run, and their barriers are initialized
  if (lane < kClusterSize)
    ptx::st_async_b32(&shared.amaxes[rank_at(work, work.place)][team], &shared.amaxes_full, lane, ptx::bits_of(amax));
}

// Returns, in lane t, the largest magnitude of token t % num_sought, after all CTAs of the cluster have sent theirs.
DEVICE float amax_of_row(const LinearParams& p, SharedStorage& shared) {
  const uint32_t lane = ptx::lane_index();
  float amax = 0.f;
  ptx::mbarrier_wait_parity_cluster(&shared.amaxes_full, 0);
#pragma unroll
  for (uint32_t cta = lane / kCastTeams; cta < kClusterSize; cta += 32 / kCastTeams)
    amax = ptx::max_f32(amax, ptx::ld_shared_f32(&shared.amaxes[cta][lane % kCastTeams]));
#pragma unroll 1
  for (uint32_t distance = num_sought(p); distance < 32; distance *= 2)
    amax = ptx::max_f32(amax, ptx::shfl_sync(amax, lane ^ distance));
  return amax;
}

// Casts this CTA's share of each group, and sends it.
DEVICE void cast_groups(const LinearParams& p, SharedStorage& shared, const Work& work) {
  const uint32_t lane = ptx::thread_index() % kLanes;
  Group group(p, work, work.k_block);
  Pieces pieces;
  pieces.load(p, work, group, lane);
  // The first loads of x are issued before B's: otherwise x would wait behind all the loads that fill the ring.
  if constexpr (kWholeRows) {
    search_rows(p, shared, work, lane);
  } else {
    ptx::bar_arrive(kXIsOnItsWay, kCasters + 32);
    ptx::cluster_wait();  // all CTAs of the cluster run, and their barriers are initialized
  }
  const float amax = kWholeRows ? amax_of_row(p, shared) : 0.f;
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const uint32_t room = number % kRooms;
    ptx::mbarrier_wait_parity(&shared.a_empty[room], (number / kRooms & 1) ^ 1);
    // Other CTAs may send data before this arrival.
    if (ptx::thread_index() == kFirstCaster) ptx::mbarrier_arrive_expect_tx(&shared.a_full[room], group.bytes());
    if (__builtin_expect(!pieces.cast<true>(shared, work, group, room, lane, amax), 0))
      pieces.cast<false>(shared, work, group, room, lane, amax);
    const uint32_t next = group.k_block + group.count;
    if (next >= work.end_k_block) break;
    group = Group(p, work, next);
    pieces.load(p, work, group, lane);
  }
}

DEVICE void multiply_groups(const LinearParams& p, SharedStorage& shared, const Work& work,
                            float (&total)[kAccumulators]) {
  const uint32_t b_address = ptx::smem_address(shared.b) + ptx::warp_index() / 4 * 64 * kBlockK;
  float of_tokens[1], of_rows[2];
  if constexpr (kWholeRows) {
    load_scales(of_rows, p.sfb, p.sfb_stride_n, work.row_n + ptx::warp_index() * 16 + ptx::lane_index() / 4, 8, p.n);
    of_tokens[0] = scale_of(amax_of_row(p, shared), 0.f, false);
  }
#pragma unroll
  for (float& x : total) x = 0;
  RingPosition at;
  uint32_t number = 0;
#pragma unroll 1
  for (uint32_t first = work.k_block; first < work.end_k_block; first += kGroupKBlocks, ++number) {
    const uint32_t room = number % kRooms, left = work.end_k_block - first;
    const uint32_t a_address = ptx::smem_address(shared.a[room]);
    ptx::mbarrier_wait_parity_cluster(&shared.a_full[room], number / kRooms & 1);
    ptx::fence_proxy_async_shared();  // WGMMA reads bytes that threads have sent
    if (has_tile(p, work))
      multiply_k_blocks<!kWholeRows>(
          shared.ring, b_address, [&](uint32_t i, uint32_t) { return a_address + i * kABytes; }, shared.scales[room],
          left < kGroupKBlocks ? left : kGroupKBlocks, at, total);
    // Arrives only at CTAs that will wait for this arrival: other CTAs may have ended.
    if (left > kRooms * kGroupKBlocks && ptx::lane_index() < kClusterN)
      ptx::mbarrier_arrive_cluster(&shared.a_empty[room], rank_at(work, ptx::lane_index()));
  }
  if constexpr (kWholeRows) multiply_by_scales(total, of_tokens, of_rows);
}

KERNEL(kNumThreads, kCtasPerSm) fp8_gemm_linear_decode(GRID_CONSTANT LinearParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const Work work(p);
  const uint32_t warp = ptx::warp_index();

  if (warp == kNumMathWarps && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_b);
    for (uint32_t room = 0; room < kRooms; ++room) {
      ptx::mbarrier_init(&shared.a_full[room], 1);
      ptx::mbarrier_init(&shared.a_empty[room], kClusterN * kNumMathWarps);
    }
    if constexpr (kWholeRows) {
      ptx::mbarrier_init(&shared.amaxes_full, 1);
      ptx::mbarrier_arrive_expect_tx(&shared.amaxes_full, sizeof(shared.amaxes));
    }
    init_barriers(shared, work);
  }
  ptx::cluster_arrive_relaxed();  // tells the cluster that this CTA runs, and that others may write to it

  // Only after this wait may data of the previous kernel be read, and B may be its data.
  ptx::griddepcontrol_wait();
  const bool has_k_blocks = work.k_block < work.end_k_block;
  if (warp > kNumMathWarps) {
    if (has_k_blocks) cast_groups(p, shared, work);
  } else if (warp == kNumMathWarps) {
    if (has_k_blocks) ptx::bar_sync(kXIsOnItsWay, kCasters + 32);
    if (has_tile(p, work) && ptx::elect_sync()) load_k_blocks(p, shared, work);
    ptx::syncwarp();
    ptx::cluster_wait();
  } else {
    ptx::cluster_wait();
    float total[kAccumulators];
    multiply_groups(p, shared, work, total);
    ptx::griddepcontrol_launch_dependents();
    add_up_and_store(p, shared, work, total);
  }
}
