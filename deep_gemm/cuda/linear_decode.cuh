// D = C + cast(x) @ B.T for few rows of BF16, the tokens of a decode step: each CTA casts what it multiplies. It gives the
// bits of cast_rows and fp8_gemm_decode one after the other.
//
//   producer, one thread         for each k-block:           empty --wait--> TMA B --bytes--> full
//   math, 1 or 2 warpgroups      for each group of k-blocks: registers -> largest magnitude of a token's 128 columns
//                                                            -> sfa * sfb, FP8 values -> shared memory
//                                                            x of the next group -> registers
//                                for each k-block of it:     full --wait--> WGMMA, promote --arrive--> empty
//                                after the last k-block:     accumulators --cluster--> sums -> transposed -> D
//
// While a group is cast the ring fills with B, which needs longer to arrive. decode/tile.cuh has what a CTA computes, the
// loop over k-blocks, and the way to D.
#pragma once
#include "cast/values.cuh"
#include "config.cuh"
#include "decode/tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

struct LinearParams {
  ptx::TensorMap map_b;  // boxes have no more rows than B
  const uint8_t* x;
  const float* sfb;
  uint8_t* d;
  const uint8_t* c;
  uint64_t d_pitch, c_pitch;  // in elements; c_pitch is 0 for a bias
  uint32_t x_pitch;           // in bytes; 32 bits, so that an address is one instruction
  uint32_t sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
  uint32_t slot_bytes;  // of one box of B
};
#include "linear_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

// A block is a token's 128 columns. A team of kLanes lanes casts kBlocksOfTeam of a group's.
constexpr uint32_t kMathTeams = kNumMathThreads / kLanes;
constexpr uint32_t kBlocksOfTeam = kGroupKBlocks * kBlockTokens / kMathTeams;
static_assert(kBlocksOfTeam * kMathTeams == kGroupKBlocks * kBlockTokens, "each team has as many blocks as the others");
static_assert(kElements * kLanes == kBlock && kBlock == kBlockK, "a team's lanes hold a block");

struct SharedStorage {
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(1024) uint8_t a[kGroupKBlocks][kABytes];  // rows of tokens that are not there are never written
  alignas(128) float exchange[kClusterK > 1 ? exchange_floats(kAccumulators) : 4];
  float scales[kGroupKBlocks * kBlockTokens];  // sfa * sfb: [k-block][token]
  Ring ring;
  uint64_t received;  // by `exchange`
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "LinearDecodeConfig.shared_bytes and SharedStorage differ");
static_assert(kClusterK > 1 || sizeof(SharedStorage::b) >= kBlockTokens * kBlockN * 4, "the ring must hold a tile");

// Loads this CTA's k-blocks of B, each into the next slot of the ring.
DEVICE void load_k_blocks(const LinearParams& p, SharedStorage& shared, const Work& work) {
  // What the kernel before wrote can be read from here on; B counts as such.
  ptx::griddepcontrol_wait();
  RingPosition at;
  for (uint32_t i = work.k_block; i < work.end_k_block; ++i, at = at.next()) {
    uint64_t* full = &shared.ring.full[at.stage];
    wait_until_free(shared.ring, at);
    ptx::mbarrier_arrive_expect_tx(full, p.slot_bytes);
    ptx::tma_load_2d(&p.map_b, full, shared.b[at.stage], i * kBlockK, work.row_n);
  }
}

// Some k-blocks of the tokens that are there, and the blocks that they have, counted token by token.
struct Group {
  uint32_t k_block, count, num_blocks;
  uint32_t reciprocal;  // 2^20 / count, rounded up

  DEVICE Group(const LinearParams& p, const Work& work, uint32_t first)
      : k_block(first),
        count(work.end_k_block - first < kGroupKBlocks ? work.end_k_block - first : kGroupKBlocks),
        num_blocks((p.m - work.row_m < kBlockTokens ? p.m - work.row_m : kBlockTokens) * count),
        reciprocal(((1 << 20) + count - 1) / count) {}
};

// One of a group's blocks: the i-th of this thread's team.
struct Place {
  uint32_t block, token, k_block;  // counted from the first of the group

  DEVICE Place(const Group& group, uint32_t i) {
    block = i * kMathTeams + ptx::thread_index() / kLanes;
    token = block * group.reciprocal >> 20;  // exact: blocks are few
    k_block = block - token * group.count;
  }
  DEVICE bool is_there(const Group& group) const { return block < group.num_blocks; }
};
static_assert(kGroupKBlocks * kBlockTokens <= 1024, "the quotients of Place are exact");

// Where a lane's 8 columns of a token lie in a k-block of A: rows of 128 bytes, whose 16-byte chunks are swizzled as TMA does.
DEVICE uint32_t offset_in_a(uint32_t token, uint32_t lane) {
  return token * kBlockK + ((lane / 2 ^ token % 8) * 16 + lane % 2 * 8);
}

// What a thread holds of a group's blocks before they are cast.
struct Pieces {
  Piece held[kBlocksOfTeam];
  float sfb;  // of the block whose scale this lane computes

  // All loads are under way before the first is used. Not by ".nc", which the compiler may move to before
  // griddepcontrol_wait.
  DEVICE void load(const LinearParams& p, const Work& work, const Group& group, uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kBlocksOfTeam; ++i) {
      const Place at(group, i);
      const uint32_t column = (group.k_block + at.k_block) * kBlockK + lane * kElements;
      held[i] = {};
      if (!at.is_there(group) || column >= p.k) continue;
      const uint8_t* row = p.x + static_cast<uint64_t>(work.row_m + at.token) * p.x_pitch;
      const ptx::Uint4 loaded = ptx::ld_global_v4_b32(row + column * kInputBytes);
      held[i] = {loaded.x, loaded.y, loaded.z, loaded.w};
    }
    const Place at(group, lane % kBlocksOfTeam);
    const uint32_t k_block = group.k_block + (at.is_there(group) ? at.k_block : 0);
    sfb = ptx::ld_global_f32(p.sfb + static_cast<uint64_t>(work.row_n / 128) * p.sfb_stride_n +
                             static_cast<uint64_t>(k_block) * p.sfb_stride_k);
  }

  // Writes values and scales. Tells whether it has: it writes nothing if it takes blocks for ordinary of which one is not.
  template <bool kIsOrdinary>
  DEVICE bool cast(SharedStorage& shared, const Group& group, uint32_t lane) const {
    // A lane has the scale of one block.
    uint32_t keys[kBlocksOfTeam];
#pragma unroll
    for (uint32_t i = 0; i < kBlocksOfTeam; ++i) keys[i] = key_of<kIsOrdinary>(held[i]);
    const Divisor of_lane = divisor_of<kIsOrdinary>(amax_of(largest_of_team(keys, lane)), 0.f, false);
    if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return false;

    const uint32_t first_of_team = ptx::lane_index() / kLanes * kLanes;
#pragma unroll
    for (uint32_t i = 0; i < kBlocksOfTeam; ++i) {
      const Place at(group, i);
      const Divisor divisor = {ptx::shfl_sync(of_lane.scale, first_of_team + i),
                               ptx::shfl_sync(of_lane.reciprocal, first_of_team + i)};
      if (!at.is_there(group)) continue;
      float quotients[kElements];
#pragma unroll
      for (uint32_t e = 0; e < kElements; ++e) quotients[e] = quotient_of<kIsOrdinary>(element_of(held[i], e), divisor);
      const Values values = pack_values(quotients);
      ptx::st_shared_v2_b32(shared.a[at.k_block] + offset_in_a(at.token, lane), values.words[0], values.words[1]);
    }
    const Place at(group, lane);
    if (lane < kBlocksOfTeam && at.is_there(group))
      ptx::st_shared_f32(shared.scales + at.k_block * kBlockTokens + at.token, of_lane.scale * sfb);
    return true;
  }
};

// Casts and multiplies this CTA's k-blocks.
DEVICE void multiply(const LinearParams& p, SharedStorage& shared, const Work& work, float (&total)[kAccumulators]) {
  const uint32_t lane = ptx::thread_index() % kLanes;
  const uint32_t b_address = ptx::smem_address(shared.b) + ptx::warp_index() / 4 * 64 * kBlockK;
  const uint32_t a_address = ptx::smem_address(shared.a);
#pragma unroll
  for (float& x : total) x = 0;
  if (work.k_block == work.end_k_block) return;
  Group group(p, work, work.k_block);
  Pieces pieces;
  pieces.load(p, work, group, lane);
  RingPosition at;
  while (true) {
    if (__builtin_expect(!pieces.cast<true>(shared, group, lane), 0)) pieces.cast<false>(shared, group, lane);
    ptx::fence_proxy_async_shared();  // WGMMA is going to read what this thread has written
    ptx::bar_sync(1, kNumMathThreads);
    const uint32_t count = group.count, next = group.k_block + count;
    if (next < work.end_k_block) {
      group = Group(p, work, next);
      pieces.load(p, work, group, lane);
    }
    multiply_k_blocks(
        shared.ring, b_address, [&](uint32_t i, uint32_t) { return a_address + i * kABytes; }, shared.scales, count, at,
        total);
    if (next >= work.end_k_block) break;
    ptx::bar_sync(1, kNumMathThreads);  // everybody is done with A and scales
  }
}

KERNEL(kNumThreads, kCtasPerSm) linear_decode(GRID_CONSTANT LinearParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const Work work(p);
  const bool is_producer = ptx::warp_index() == kNumMathWarps;

  if (is_producer && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_b);
    init_barriers(shared, work);
  }
  ptx::syncthreads();
  if constexpr (kClusterK > 1) ptx::cluster_arrive_relaxed();  // this CTA runs, and may be written to

  if (is_producer) {
    if (ptx::elect_sync()) load_k_blocks(p, shared, work);
    ptx::syncwarp();
    if constexpr (kClusterK > 1) ptx::cluster_wait();
  } else {
    ptx::griddepcontrol_wait();
    float total[kAccumulators];
    multiply(p, shared, work, total);
    ptx::griddepcontrol_launch_dependents();
    add_up_and_store(p, shared, work, total);
  }
}
