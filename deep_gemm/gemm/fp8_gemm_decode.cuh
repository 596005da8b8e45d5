// D = C + A @ B.T for few rows of A, the tokens of a decode step. FP8 operands with fine-grained scales, two-level
// accumulation. Such a product lasts as long as B needs to arrive, so all SMs must load at once, and much at a time:
//
//   producer, one thread         for each k-block:       empty --wait--> TMA B, A --bytes--> full
//   math, 1 or 2 warpgroups      for 32 k-blocks:        sfa * sfb -> shared memory
//                                for each k-block:       full --wait--> WGMMA, promote --arrive--> empty
//                                after the last k-block: accumulators --cluster--> sums -> transposed -> D
//
// decode/tile.cuh has what a CTA computes, the loop over k-blocks, and the way to D; decode/product.cuh what the kernel is given,
// of one product or of several.
#pragma once
#include "config.cuh"
#include "decode/tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include DECODE_WORK
#include "params_layout.cuh"  // asserts that Params lies as core/params.py packs it

// How many k-blocks have their scales in shared memory at a time.
constexpr uint32_t kScaleBlocks = 32;
constexpr uint32_t kScalesPerThread = kScaleBlocks * kBlockTokens / kNumMathThreads;

struct SharedStorage {
  alignas(1024) uint8_t b[kNumStages][kBBytes];
  alignas(1024) uint8_t a[kNumStages][kABytes];  // rows past the box are never written, and their columns never stored
  alignas(128) float exchange[kClusterK > 1 ? exchange_floats(kAccumulators) : 4];
  float scales[kScaleBlocks * kBlockTokens];
  Ring ring;
  uint64_t received;  // by `exchange`
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "DecodeConfig.shared_bytes and SharedStorage differ");
static_assert(kClusterK > 1 || sizeof(SharedStorage::b) >= kBlockTokens * kBlockN * 4, "the ring must hold a tile");

// Loads this CTA's k-blocks, each into the next slot of the ring.
DEVICE void load_k_blocks(const Params& p, SharedStorage& shared, const CtaWork& work) {
  const auto load_b = [&](uint32_t i, uint32_t stage) {
    ptx::mbarrier_arrive_expect_tx(&shared.ring.full[stage], p.slot_bytes);
    load_box(&p.map_b, &shared.ring.full[stage], shared.b[stage], i * kBlockK, work.row_n, work);
  };
  const auto load_a = [&](uint32_t i, uint32_t stage) {
    load_box(&p.map_a, &shared.ring.full[stage], shared.a[stage], i * kBlockK, work.row_m, work);
  };
  uint32_t i = work.k_block, end_ahead = work.k_block;
  if (p.weight_is_ready) {
    const uint32_t count = work.end_k_block - work.k_block;
    end_ahead += count < kNumStages ? count : kNumStages;
#pragma unroll 1
    for (uint32_t stage = 0; stage < end_ahead - work.k_block; ++stage) load_b(work.k_block + stage, stage);
  }
  // What the kernel before wrote can be read from here on; B counts as such, unless it is ready.
  ptx::griddepcontrol_wait();
  RingPosition at;
#pragma unroll 1
  for (; i < end_ahead; ++i, at = at.next()) load_a(i, at.stage);
  for (; i < work.end_k_block; ++i, at = at.next()) {
    wait_until_free(shared.ring, at);
    load_b(i, at.stage);
    load_a(i, at.stage);
  }
}

// sfa * sfb for 32 k-blocks: [k-block][token] in shared memory, on their way in registers before that. Each of these
// products is needed by 64 or 128 columns of D; a tile lies within one 128x128 block of B, so there are no others.
struct Scales {
  float sfa[kScalesPerThread], sfb;

  // Past the last token or k-block the last one is loaded again: never an address outside. Not by ".nc", which the
  // compiler may move to before griddepcontrol_wait.
  DEVICE void load(const DecodeProduct& p, const Work& work, uint32_t first_k_block) {
    const auto k_block = [&](uint32_t i) {
      return first_k_block + i < work.end_k_block ? first_k_block + i : work.end_k_block - 1;
    };
    sfb = ptx::ld_global_f32(p.sfb + static_cast<uint64_t>(work.row_n / 128) * p.sfb_stride_n +
                             static_cast<uint64_t>(k_block(ptx::lane_index())) * p.sfb_stride_k);
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      const uint32_t token = work.row_m + index % kBlockTokens;
      sfa[i] = ptx::ld_global_f32(p.sfa + static_cast<uint64_t>(token < p.m ? token : p.m - 1) * p.sfa_stride_m +
                                  static_cast<uint64_t>(k_block(index / kBlockTokens)) * p.sfa_stride_k);
    }
  }

  DEVICE void store(float* scales) const {
#pragma unroll
    for (uint32_t i = 0; i < kScalesPerThread; ++i) {
      const uint32_t index = i * kNumMathThreads + ptx::thread_index();
      ptx::st_shared_f32(scales + index, sfa[i] * ptx::shfl_sync(sfb, index / kBlockTokens));
    }
  }
};

// Multiplies this CTA's k-blocks, in groups that have their scales in shared memory.
DEVICE void multiply(const DecodeProduct& p, SharedStorage& shared, const Work& work, float (&total)[kAccumulators]) {
  const uint32_t b_address = ptx::smem_address(shared.b) + ptx::warp_index() / 4 * 64 * kBlockK;
  const uint32_t a_address = ptx::smem_address(shared.a);
#pragma unroll
  for (float& x : total) x = 0;
  Scales scales;
  if (work.k_block < work.end_k_block) scales.load(p, work, work.k_block);
  RingPosition at;
  for (uint32_t first = work.k_block; first < work.end_k_block; first += kScaleBlocks) {
    ptx::bar_sync(1, kNumMathThreads);  // everybody is done with the scales before
    scales.store(shared.scales);
    ptx::bar_sync(1, kNumMathThreads);
    if (first + kScaleBlocks < work.end_k_block) scales.load(p, work, first + kScaleBlocks);
    const uint32_t count = work.end_k_block - first < kScaleBlocks ? work.end_k_block - first : kScaleBlocks;
    multiply_k_blocks(
        shared.ring, b_address, [&](uint32_t, uint32_t stage) { return a_address + stage * kABytes; }, shared.scales,
        count, at, total);
  }
}

KERNEL(kNumThreads, kCtasPerSm) fp8_gemm_decode(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const CtaWork work(p);
  const bool is_producer = ptx::warp_index() == kNumMathWarps;

  if (is_producer && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_b);
    ptx::prefetch_tensormap(&p.map_a);
    init_barriers(shared, work);
  }
  ptx::syncthreads();
  if constexpr (kClusterK > 1) ptx::cluster_arrive_relaxed();  // this CTA runs, and may be written to

  if (is_producer) {
    if (ptx::elect_sync()) load_k_blocks(p, shared, work);
    ptx::syncwarp();
    if constexpr (kClusterK > 1) ptx::cluster_wait();
  } else {
    const auto& product = product_of(p, work);
    ptx::griddepcontrol_wait();
    float total[kAccumulators];
    multiply(product, shared, work, total);
    ptx::griddepcontrol_launch_dependents();
    if constexpr (kClusterK > 1) ptx::cluster_wait();
    add_up_and_store(product, shared, work, total);
  }
}
