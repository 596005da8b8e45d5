// D = C + A @ B.T for few rows of A, the tokens of a decode step. FP8 operands with fine-grained scales, two-level
// accumulation. Such a product lasts as long as B needs to arrive, so all SMs must load at once, and much at a time:
//
//   producer, one thread         for each k-block:       empty --wait--> TMA B, A --bytes--> full
//   math, 1 or 2 warpgroups      for 32 k-blocks:        sfa * sfb -> shared memory
//                                for each k-block:       full --wait--> WGMMA, promote --arrive--> empty
//                                after the last k-block: accumulators --cluster--> sums -> transposed -> D
//
// Rows of B are on WGMMA's side of 64, tokens on the side that may be as narrow as 8. So the accumulators are a tile of
// D transposed: 64 columns of D for each warpgroup, times kBlockTokens rows. The k-blocks of a tile are shared out to the
// kClusterK CTAs of a cluster, rank 0 the first of them, and their sums are added by exchange.cuh.
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"
#include "exchange.cuh"

struct Params {
  // Boxes have no more rows than the tensors: the hardware takes about 2 ns for each row that lies outside.
  ptx::TensorMap map_a, map_b;
  const float *sfa, *sfb;
  uint8_t* d;
  const uint8_t* c;
  uint64_t d_pitch, c_pitch;  // in elements
  uint32_t sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
  uint32_t slot_bytes;  // of one box of A and one of B
  // This kernel starts when all is over that ran before the kernel ahead of it, which writes A and its scales alone. So B
  // may be loaded before griddepcontrol_wait.
  uint32_t weight_is_ready;
};
#include "params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

// Operand tiles are rows of 128 bytes, swizzled in atoms of 8 rows: 1024 bytes, to which their addresses are aligned.
constexpr uint32_t kABytes = kBlockTokens * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr uint32_t kNumMathThreads = kNumMathWarps * 32;
constexpr uint32_t kAccumulators = kBlockTokens / 2;
// Whether the last tokens' tile ends where the tokens do, instead of hanging out, and so computes some again, to the same
// bits: TMA would fill what hangs out with zeros. Not where C is added, which must happen once.
constexpr bool kMovesLastTileUp = !kWithC;
// How many k-blocks have their scales in shared memory at a time.
constexpr uint32_t kScaleBlocks = 32;
// Whether a k-block's scales find registers beside partial sums and totals.
constexpr bool kScalesFit = kBlockTokens <= 64;
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

// What this CTA computes: a tile of D, over some of its k-blocks. There may be fewer of them than CTAs.
struct Work {
  uint32_t rank, row_m, row_n, k_block, end_k_block;

  DEVICE explicit Work(const Params& p) {
    rank = kClusterK > 1 ? ptx::cluster_rank() : 0;
    // Tiles that share rows of B follow each other.
    const uint32_t tile = ptx::block_index() / kClusterK, tiles_m = ceil_div(p.m, kBlockTokens);
    row_m = tile % tiles_m * kBlockTokens;
    if constexpr (kMovesLastTileUp) {
      const uint32_t last_row_m = p.m > kBlockTokens ? p.m - kBlockTokens : 0;
      row_m = row_m < last_row_m ? row_m : last_row_m;
    }
    row_n = tile / tiles_m * kBlockN;
    const uint32_t num_k_blocks = ceil_div(p.k, kBlockK);
    k_block = num_k_blocks * rank / kClusterK;
    end_k_block = num_k_blocks * (rank + 1) / kClusterK;
  }
};

// Loads this CTA's k-blocks, each into the next slot of the ring.
DEVICE void load_k_blocks(const Params& p, SharedStorage& shared, const Work& work) {
  const auto load_b = [&](uint32_t i, uint32_t stage) {
    ptx::mbarrier_arrive_expect_tx(&shared.ring.full[stage], p.slot_bytes);
    ptx::tma_load_2d(&p.map_b, &shared.ring.full[stage], shared.b[stage], i * kBlockK, work.row_n);
  };
  const auto load_a = [&](uint32_t i, uint32_t stage) {
    ptx::tma_load_2d(&p.map_a, &shared.ring.full[stage], shared.a[stage], i * kBlockK, work.row_m);
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
  DEVICE void load(const Params& p, const Work& work, uint32_t first_k_block) {
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

// Multiplies one slot: this warpgroup's 64 rows of B by the tokens, 128 deep, from zero.
DEVICE void issue_k_block(float (&partial)[kAccumulators], uint32_t b_address, uint32_t a_address) {
  ptx::fence_registers(partial);
  ptx::wgmma_fence();
#pragma unroll
  for (uint32_t k = 0; k < kBlockK; k += 32)  // 32 values of k are 32 bytes into the swizzled rows
    ptx::wgmma_m64k32_e4m3<kBlockTokens>(partial, ptx::smem_descriptor(b_address + k),
                                         ptx::smem_descriptor(a_address + k), k != 0);
  ptx::wgmma_commit_group();
}

// Accumulator 4 * g + i of a thread: token 8 * g + lane % 4 * 2 + i % 2, column lane / 4 + i / 2 * 8 of its warp's 16.
// (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32".)
DEVICE void multiply_k_blocks(const Params& p, SharedStorage& shared, const Work& work,
                              float (&total)[kAccumulators]) {
  const uint32_t lane = ptx::lane_index();
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
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i, at = at.next()) {
      float partial[kAccumulators];
      ptx::Float2 scale[kBlockTokens / 8];
      wait_until_loaded(shared.ring, at);
      issue_k_block(partial, b_address + at.stage * kBBytes, a_address + at.stage * kABytes);
      const auto load_scales = [&] {
#pragma unroll
        for (uint32_t g = 0; g < kBlockTokens / 8; ++g)
          scale[g] = ptx::ld_shared_v2_f32(shared.scales + i * kBlockTokens + g * 8 + lane % 4 * 2);
      };
      if constexpr (kScalesFit) load_scales();  // while the tensor cores work
      ptx::fence_registers(partial);
      ptx::wgmma_wait_group<0>();
      release(shared.ring, at, lane);
      if constexpr (!kScalesFit) load_scales();
#pragma unroll
      for (uint32_t j = 0; j < kAccumulators; ++j)
        total[j] = ptx::fma(partial[j], j % 2 ? scale[j / 4].y : scale[j / 4].x, total[j]);
    }
  }
}

// Where (token, column) of a chunk of 8 x 16 lies in 512 bytes of shared memory: [token][column], in an order of rows and
// of their quarters in which lanes that hold a column each, and lanes that hold a quarter each, meet no bank conflict.
DEVICE uint32_t transposed(uint32_t token, uint32_t column) {
  return (token ^ (token >> 1 & 1)) * 16 + (column ^ token / 4 * 8);
}

// Writes a chunk to D, added to C, by way of shared memory of the warp: 4 columns of a token for each lane.
DEVICE void store_chunk(const Params& p, float* room, const ptx::Float4& v, uint32_t row_m, uint32_t row_n) {
  const uint32_t lane = ptx::lane_index(), token = lane % 4 * 2, column = lane / 4;
  ptx::syncwarp();  // all lanes have read what was here
  ptx::st_shared_f32(room + transposed(token, column), v.x);
  ptx::st_shared_f32(room + transposed(token + 1, column), v.y);
  ptx::st_shared_f32(room + transposed(token, column + 8), v.z);
  ptx::st_shared_f32(room + transposed(token + 1, column + 8), v.w);
  ptx::syncwarp();
  ptx::Float4 d = ptx::ld_shared_v4_f32(room + transposed(lane / 4, lane % 4 * 4));
  const uint32_t d_row = row_m + lane / 4, d_column = row_n + lane % 4 * 4;
  if (d_row >= p.m || d_column >= p.n) return;  // n is a multiple of 4
  if constexpr (kWithC) {
    const uint8_t* from = p.c + (d_row * p.c_pitch + d_column) * kOutputBytes;
    if constexpr (kOutputIsFp32) {
      const ptx::Float4 c = ptx::ld_global_v4_f32(from);
      d.x += c.x, d.y += c.y, d.z += c.z, d.w += c.w;
    } else {
      const ptx::Uint2 c = ptx::ld_global_v2_b32(from);
      const ptx::Float2 low = ptx::unpack_bf16(c.x), high = ptx::unpack_bf16(c.y);
      d.x += low.x, d.y += low.y, d.z += high.x, d.w += high.y;
    }
  }
  uint8_t* to = p.d + (d_row * p.d_pitch + d_column) * kOutputBytes;
  if constexpr (kOutputIsFp32)
    ptx::st_global_v4_f32(to, d.x, d.y, d.z, d.w);
  else
    ptx::st_global_v2_b32(to, ptx::pack_bf16(d.x, d.y), ptx::pack_bf16(d.z, d.w));
}

// Writes this CTA's share of the tile. Alone, it has all of it in its own registers.
DEVICE void store_share(const Params& p, float* exchange, const Work& work, const float (&total)[kAccumulators]) {
  constexpr uint32_t kShare = chunks_per_cta(kAccumulators);
  const uint32_t warp = ptx::warp_index();
#pragma unroll
  for (uint32_t i = 0; i < ceil_div(kShare, kNumMathWarps); ++i) {
    const uint32_t chunk_of_cta = i * kNumMathWarps + warp, chunk = work.rank * kShare + chunk_of_cta;
    if (chunk_of_cta >= kShare || chunk >= chunks_of_tile(kAccumulators)) break;
    ptx::Float4 sum;
    if constexpr (kClusterK > 1)
      sum = sum_chunk<kAccumulators>(exchange, chunk_of_cta, ptx::lane_index());
    else
      sum = {total[i * 4], total[i * 4 + 1], total[i * 4 + 2], total[i * 4 + 3]};
    store_chunk(p, exchange + chunk_of_cta * kChunkFloats, sum, work.row_m + chunk / kNumMathWarps * 8,
                work.row_n + chunk % kNumMathWarps * 16);
  }
}

KERNEL(kNumThreads, kCtasPerSm) fp8_gemm_decode(GRID_CONSTANT Params p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warp = ptx::warp_index();
  const Work work(p);
  const bool is_producer = warp == kNumMathWarps;

  if (is_producer && ptx::elect_sync()) {
    ptx::prefetch_tensormap(&p.map_b);
    ptx::prefetch_tensormap(&p.map_a);
    ptx::mbarrier_init(&shared.received, 1);
    shared.ring.init();
    if constexpr (kClusterK > 1) expect_chunks<kAccumulators>(&shared.received, work.rank);
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
    multiply_k_blocks(p, shared, work, total);
    ptx::griddepcontrol_launch_dependents();
    if constexpr (kClusterK > 1) {
      ptx::cluster_wait();
      send_chunks(total, shared.exchange, &shared.received, work.rank, warp, ptx::lane_index());
      // All that is sent to this CTA has arrived: nobody writes to it any more, and it may end.
      ptx::mbarrier_wait_parity_cluster(&shared.received, 0);
      store_share(p, shared.exchange, work, total);
    } else {
      ptx::bar_sync(1, kNumMathThreads);  // the ring has been read
      store_share(p, reinterpret_cast<float*>(shared.b), work, total);
    }
  }
}
