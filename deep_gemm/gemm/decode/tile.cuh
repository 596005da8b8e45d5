// Code that the kernels for few rows of A share: a CTA's tile of D and its k-blocks, the loop over these k-blocks, and
// adding up and storing the sums.
//
// WGMMA's 64 rows are rows of B; its columns, at least 8, are tokens. So the accumulators are a tile of D transposed: 64
// columns of D for each warpgroup, times kBlockTokens rows. The kClusterK CTAs of a cluster split the k-blocks of a tile,
// in order of rank, and exchange.cuh adds their sums. A cluster may have kClusterN tiles side by side.
#pragma once
#include "config.cuh"
#include "exchange.cuh"
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"

// Operand tiles are rows of 128 bytes, swizzled in atoms of 8 rows. Addresses are aligned to an atom, 1024 bytes.
constexpr uint32_t kABytes = kBlockTokens * kBlockK, kBBytes = kBlockN * kBlockK;
constexpr uint32_t kNumMathThreads = kNumMathWarps * 32;
constexpr uint32_t kAccumulators = kBlockTokens / 2;
// Whether the last tile of tokens begins earlier, to end at the last token: it computes some tokens again, to the same
// bits. Otherwise TMA would fill rows past the end with zeros. Not if C is added, which must happen once.
constexpr bool kMovesLastTileUp = !kWithC;
// Whether a thread has registers for a k-block's scales besides its partial sums and totals.
constexpr bool kScalesFit = kBlockTokens <= 64;

// This CTA's work: a tile of D, and the k-blocks to multiply. A tile may have fewer k-blocks than CTAs.
struct Work {
  uint32_t rank, row_m, row_n, k_block, end_k_block;
  uint32_t place;  // index of the tile in its cluster

  Work() = default;
  template <typename Params>
  DEVICE explicit Work(const Params& p) {
    rank = kClusterK * kClusterN > 1 ? ptx::cluster_rank() : 0;
    place = kClusterN > 1 ? rank / kClusterK : 0;
    if constexpr (kClusterN > 1) rank %= kClusterK;
    // Tiles that share rows of B are consecutive.
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

// Multiplies and promotes `count` k-blocks; B is in the ring. `scales` begin at the first k-block, and are read only if
// kScaled. `a_address(i, stage)` returns the address of A for the i-th k-block, whose B is in slot `stage`. Accumulator
// 4 * g + i of a thread is for token 8 * g + lane % 4 * 2 + i % 2 and column lane / 4 + i / 2 * 8 of its warp's 16.
// (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk32".)
template <bool kScaled = true, typename AddressOfA>
DEVICE void multiply_k_blocks(Ring& ring, uint32_t b_address, const AddressOfA& a_address, const float* scales,
                              uint32_t count, RingPosition& at, float (&total)[kAccumulators]) {
  const uint32_t lane = ptx::lane_index();
#pragma unroll 1
  for (uint32_t i = 0; i < count; ++i, at = at.next()) {
    float partial[kAccumulators];
    ptx::Float2 scale[kBlockTokens / 8];
    wait_until_loaded(ring, at);
    issue_k_block(partial, b_address + at.stage * kBBytes, a_address(i, at.stage));
    const auto load_scales = [&] {
#pragma unroll
      for (uint32_t g = 0; g < kBlockTokens / 8; ++g)
        scale[g] = ptx::ld_shared_v2_f32(scales + i * kBlockTokens + g * 8 + lane % 4 * 2);
    };
    if constexpr (kScaled && kScalesFit) load_scales();  // while the tensor cores work
    ptx::fence_registers(partial);
    ptx::wgmma_wait_group<0>();
    release(ring, at, lane);
    if constexpr (kScaled && !kScalesFit) load_scales();
#pragma unroll
    for (uint32_t j = 0; j < kAccumulators; ++j)
      total[j] = kScaled ? ptx::fma(partial[j], j % 2 ? scale[j / 4].y : scale[j / 4].x, total[j]) : ptx::add_rn(total[j], partial[j]);
  }
}

// Calls `multiply(first, count)` for up to kBlocks of this CTA's k-blocks at a time, once their scales are in shared memory.
template <typename Scales, uint32_t kBlocks, typename Product, typename Storage, typename Multiply>
DEVICE void multiply_with_scales(const Product& p, Storage& shared, const Work& work, float (&total)[kAccumulators], const Multiply& multiply) {
#pragma unroll
  for (float& x : total) x = 0;
  Scales scales;
  if (work.k_block < work.end_k_block) scales.load(p, work, work.k_block);
  for (uint32_t first = work.k_block; first < work.end_k_block; first += kBlocks) {
    ptx::bar_sync(1, kNumMathThreads);  // all warps have read the previous scales
    scales.store(p, first, shared.scales);
    ptx::bar_sync(1, kNumMathThreads);
    if (first + kBlocks < work.end_k_block) scales.load(p, work, first + kBlocks);
    multiply(first, work.end_k_block - first < kBlocks ? work.end_k_block - first : kBlocks);
  }
}

// Multiplies totals by scales that are constant along k. A lane has the scales of every 32nd token and its rows of B.
DEVICE void multiply_by_scales(float (&total)[kAccumulators], const float (&of_tokens)[ceil_div(kBlockTokens, 32)],
                               const float (&of_rows)[2]) {
#pragma unroll
  for (uint32_t i = 0; i < kAccumulators; ++i) {
    const uint32_t token = i / 4 * 8 + ptx::lane_index() % 4 * 2 + i % 2;
    total[i] = ptx::mul_rn(total[i], ptx::shfl_sync(of_tokens[i / 16], token % 32) * of_rows[i / 2 % 2]);
  }
}

// Offset of (token, column) in a chunk of 8 x 16 in 512 bytes of shared memory: [token][column]. Rows and quarters of
// rows are permuted to avoid bank conflicts, whether each lane reads a column or a quarter of a row.
DEVICE uint32_t transposed(uint32_t token, uint32_t column) {
  return (token ^ (token >> 1 & 1)) * 16 + (column ^ token / 4 * 8);
}

// Stores a chunk, plus C, to D through the warp's shared memory: each lane stores 4 columns of a token.
template <typename Params>
DEVICE void store_chunk(const Params& p, float* room, const ptx::Float4& v, uint32_t row_m, uint32_t row_n) {
  const uint32_t lane = ptx::lane_index(), token = lane % 4 * 2, column = lane / 4;
  ptx::syncwarp();  // all lanes have read the previous chunk
  ptx::st_shared_f32(room + transposed(token, column), v.x);
  ptx::st_shared_f32(room + transposed(token + 1, column), v.y);
  ptx::st_shared_f32(room + transposed(token, column + 8), v.z);
  ptx::st_shared_f32(room + transposed(token + 1, column + 8), v.w);
  ptx::syncwarp();
  ptx::Float4 d = ptx::ld_shared_v4_f32(room + transposed(lane / 4, lane % 4 * 4));
  const uint32_t d_row = row_m + lane / 4, d_column = row_n + lane % 4 * 4;
  if (d_row >= p.m || d_column >= p.n) return;  // n is a multiple of 4
  if constexpr (kWithC) {
    const uint8_t* from = p.c + (d_row * p.c_pitch + d_column) * kCBytes;
    if constexpr (kCIsFp32) {
      const ptx::Float4 c = ptx::ld_global_v4_f32(from);
      d.x += c.x, d.y += c.y, d.z += c.z, d.w += c.w;
    } else {
      const ptx::Uint2 c = ptx::ld_global_v2_b32(from);
      const ptx::Float2 low = ptx::unpack_bf16(c.x), high = ptx::unpack_bf16(c.y);
      d.x += low.x, d.y += low.y, d.z += high.x, d.w += high.y;
    }
  }
  uint8_t* to = p.d + (d_row * p.d_pitch + column_of_d(p, d_column)) * kOutputBytes;
  if constexpr (kOutputIsFp32)
    ptx::st_global_v4_f32(to, d.x, d.y, d.z, d.w);
  else
    ptx::st_global_v2_b32(to, ptx::pack_bf16(d.x, d.y), ptx::pack_bf16(d.z, d.w));
}

// Stores this CTA's share of the tile. A CTA without a cluster stores all of the tile, from its own registers.
template <typename Params>
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

// Called by one thread.
template <typename Storage>
DEVICE void init_barriers(Storage& shared, const Work& work) {
  ptx::mbarrier_init(&shared.received, 1);
  shared.ring.init();
  if constexpr (kClusterK > 1) expect_chunks<kAccumulators>(&shared.received, work.rank);
}

// Adds up the math warps' totals and stores D. A CTA of a cluster has already waited until the other CTAs run.
template <typename Params, typename Storage>
DEVICE void add_up_and_store(const Params& p, Storage& shared, const Work& work, const float (&total)[kAccumulators]) {
  if constexpr (kClusterK > 1) {
    send_chunks(total, shared.exchange, &shared.received, work.rank, work.place * kClusterK, ptx::warp_index(),
                ptx::lane_index());
    // Once all chunks for this CTA have arrived, no CTA writes to it any more, so it may exit.
    ptx::mbarrier_wait_parity_cluster(&shared.received, 0);
    store_share(p, shared.exchange, work, total);
  } else {
    ptx::bar_sync(1, kNumMathThreads);  // all warps have read the ring
    store_share(p, reinterpret_cast<float*>(shared.b), work, total);
  }
}

// The tile of a CTA that computes only one.
template <typename CtaWork>
struct OneTile {
  static constexpr bool kIsOnly = true;
  struct Storage {
    DEVICE void init() {}
  };

  CtaWork work;
  bool is_taken = false;

  template <typename Params, typename Shared>
  DEVICE OneTile(const Params& p, Shared&) : work(p) {}

  // Called by the producer's warp.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    RingPosition at;
    if (ptx::elect_sync()) load(work, at, true);
    ptx::syncwarp();
  }

  // Called by a math warp.
  DEVICE bool next(CtaWork& next_work) {
    if (is_taken) return false;
    next_work = work, is_taken = true;
    return true;
  }

  template <typename Product, typename Shared>
  DEVICE void store(const Product& product, Shared& shared, const CtaWork&, const float (&total)[kAccumulators]) const {
    add_up_and_store(product, shared, work, total);
  }
};
