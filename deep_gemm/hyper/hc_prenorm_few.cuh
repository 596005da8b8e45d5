// D = A @ B.T and the sums of squares of A's rows, as in hc_prenorm.cuh, for few rows of A. There a k-block is a chain
// of latencies; here every warp has several steps' loads in flight, and waits for memory once or twice in all.
//
//   each warp    for each of its steps of 32 along k:   A, B --registers, some steps ahead--> TF32 products, squares
//                after the last:   its sums --shared--> of the CTA --cluster--> of all --> D, sqr_sum
//
// There is no ring: a warp loads its own operands. A CTA has 16 rows of A and kBlockN rows of B, in one of the caller's
// splits. CTAs of a cluster divide k, and warps take steps in turn, so together they read whole lines.
//
// A lane may have any 8 values of k of a step, the same for A and B. So lane 4 g + t loads values 8 t to 8 t + 7 of
// rows g and g + 8 of A and of rows g of B: 16 and 32 bytes. Product j of a step uses numbers 2 j and 2 j + 1.
#pragma once
#include "config.cuh"
#include "exchange.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

struct HcFewParams {
  const uint8_t* a;             // BF16 [m, k]
  const uint8_t* b;             // FP32 [n, k]
  float* d;                     // [splits, m, n]
  float* sqr_sum;               // [splits, m]
  uint64_t a_pitch, b_pitch;    // bytes
  uint64_t d_pitch, d_stride;   // in elements, from one row to the next and from one split to the next
  uint32_t m, k_blocks, splits;
  uint32_t tiles_n;  // kBlockN rows of B each
};
#include "hc_few_params_layout.cuh"  // asserts that the layout of HcFewParams is what core/params.py packs

constexpr uint32_t kTileRows = 16, kStep = 32, kStepsOfBlock = 2, kEights = kBlockN / 8;
constexpr uint32_t kNumThreads = kWarps * 32;
// Chunks of a tile's sums: one for each 8 columns, and one for squares.
constexpr uint32_t kChunks = kEights + 1, kSums = kChunks * 4;
static_assert(kNumMathWarps == 1 && chunks_of_tile(kSums) == kChunks, "one warp has a tile's sums of a chunk");

struct SharedStorage {
  alignas(16) float of_warps[kWarps][kChunks][kChunkFloats];
  alignas(16) float exchange[kClusterK > 1 ? exchange_floats(kSums) : 4];
  uint64_t received;  // all chunks for this CTA have arrived
};
static_assert(sizeof(SharedStorage) <= kSharedBytes && kSharedBytes - sizeof(SharedStorage) < 16,
              "HcFewConfig.shared_bytes and SharedStorage differ");

// This CTA's work: rows of A and B, and steps of k in one split.
struct Work {
  uint32_t row_m, row_n, split, step, end_step;

  DEVICE Work(const HcFewParams& p, uint32_t rank) {
    const uint32_t unit = ptx::block_index() / kClusterK, tiles_m = ceil_div(p.m, kTileRows), tile = unit / p.tiles_n;
    row_n = unit % p.tiles_n * kBlockN;
    row_m = tile % tiles_m * kTileRows;
    split = tile / tiles_m;
    const Part of_split(p.k_blocks, p.splits, split);
    const Part of_rank(of_split.count * kStepsOfBlock, kClusterK, rank);
    step = of_split.first * kStepsOfBlock + of_rank.first;
    end_step = step + of_rank.count;
  }
};

// Addresses of a lane's numbers. Rows past the end of A read A's last row again; their sums are not stored.
struct Source {
  const uint8_t* a[2];
  const uint8_t* b;
  uint64_t next_b;  // bytes to 8 rows further

  DEVICE Source(const HcFewParams& p, const Work& work, uint32_t lane) {
    const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t row = work.row_m + g + i * 8;
      a[i] = p.a + (row < p.m ? row : p.m - 1) * p.a_pitch + t * 16;
    }
    b = p.b + (work.row_n + g) * p.b_pitch + t * 32;
    next_b = p.b_pitch * 8;
  }
};

// A lane's numbers of a step.
struct Step {
  ptx::Uint4 a[2], b[kEights][2];

  DEVICE void load(const Source& source, uint32_t step) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) a[i] = ptx::ld_global_nc_v4_b32(source.a[i] + static_cast<uint64_t>(step) * (kStep * 2));
#pragma unroll
    for (uint32_t eight = 0; eight < kEights; ++eight)
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
        b[eight][i] = ptx::ld_global_nc_v4_b32(source.b + eight * source.next_b + static_cast<uint64_t>(step) * (kStep * 4) + i * 16);
  }
};

// Rounds FP32 bits so that the upper 19 are the nearest TF32 number, ties to even. A NaN stays a NaN.
DEVICE uint32_t nearest_tf32(uint32_t bits) {
  const uint32_t nearest = bits + 0xfff + (bits >> 13 & 1);
  return ptx::float_of(bits) == ptx::float_of(bits) ? nearest : 0x7fffffffu;
}

struct Sums {
  float d[kEights][4] = {};
  float squares[2][2] = {};  // squares of rows g and g + 8, in two separate sums each

  DEVICE void add(const Step& x) {
    const uint32_t pairs[2][4] = {{x.a[0].x, x.a[0].y, x.a[0].z, x.a[0].w}, {x.a[1].x, x.a[1].y, x.a[1].z, x.a[1].w}};
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      uint32_t a[2][2];
#pragma unroll
      for (uint32_t row = 0; row < 2; ++row) {
        a[row][0] = pairs[row][j] << 16, a[row][1] = pairs[row][j] & 0xffff0000u;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
          const float value = ptx::float_of(a[row][i]);
          squares[row][i] = ptx::fma_rn(value, value, squares[row][i]);
        }
      }
#pragma unroll
      for (uint32_t eight = 0; eight < kEights; ++eight) {
        const ptx::Uint4 half = x.b[eight][j / 2];
        ptx::mma_m16n8k8_tf32(d[eight], a[0][0], a[1][0], a[0][1], a[1][1], nearest_tf32(j % 2 ? half.z : half.x),
                              nearest_tf32(j % 2 ? half.w : half.y));
      }
    }
  }

  // Returns the sum of a row's squares, in all lanes of its quad.
  DEVICE float of_row(uint32_t row) const {
    float sum = squares[row][0] + squares[row][1];
    sum += ptx::shfl_xor_sync(sum, 1);
    return sum + ptx::shfl_xor_sync(sum, 2);
  }

  DEVICE void store(float (&to)[kChunks][kChunkFloats], uint32_t lane) const {
#pragma unroll
    for (uint32_t eight = 0; eight < kEights; ++eight)
      ptx::st_shared_v4_b32(&to[eight][lane * 4], ptx::bits_of(d[eight][0]), ptx::bits_of(d[eight][1]),
                            ptx::bits_of(d[eight][2]), ptx::bits_of(d[eight][3]));
    ptx::st_shared_v4_b32(&to[kEights][lane * 4], ptx::bits_of(of_row(0)), ptx::bits_of(of_row(1)), 0, 0);
  }
};

// Multiplies all steps of a warp. The next steps are in registers already; register indices are known at compile time.
DEVICE void multiply(const HcFewParams& p, const Work& work, uint32_t warp, uint32_t lane, Sums& sums) {
  const Source source(p, work, lane);
  Step steps[kAhead];
#pragma unroll
  for (uint32_t i = 0; i < kAhead; ++i)
    if (work.step + warp + i * kWarps < work.end_step) steps[i].load(source, work.step + warp + i * kWarps);
#pragma unroll 1
  for (uint32_t first = work.step + warp; first < work.end_step; first += kAhead * kWarps) {
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t step = first + i * kWarps, next = step + kAhead * kWarps;
      if (step >= work.end_step) break;
      sums.add(steps[i]);
      if (next < work.end_step) steps[i].load(source, next);
    }
  }
}

// Stores four sums of each lane: of 8 columns, in the order of the products' accumulators, or of squares.
DEVICE void store_chunk(const HcFewParams& p, const Work& work, uint32_t chunk, uint32_t lane, const ptx::Float4& sum) {
  const uint32_t row = work.row_m + lane / 4;
  const bool has_row = row < p.m, has_next = row + 8 < p.m;
  if (chunk == kEights) {
    float* to = p.sqr_sum + static_cast<uint64_t>(work.split) * p.m + row;
    const bool is_mine = work.row_n == 0 && lane % 4 == 0;
    if (is_mine && has_row) ptx::st_global_f32(to, sum.x);
    if (is_mine && has_next) ptx::st_global_f32(to + 8, sum.y);
    return;
  }
  float* to = p.d + work.split * p.d_stride + row * p.d_pitch + work.row_n + chunk * 8 + lane % 4 * 2;
  float* next = to + 8 * p.d_pitch;
  if (has_row) ptx::st_global_f32(to, sum.x), ptx::st_global_f32(to + 1, sum.y);
  if (has_next) ptx::st_global_f32(next, sum.z), ptx::st_global_f32(next + 1, sum.w);
}

// Adds up a chunk's sums of the CTA's warps, in the order of the warps.
DEVICE ptx::Float4 sum_of_warps(const SharedStorage& shared, uint32_t chunk, uint32_t lane) {
  ptx::Float4 sum = ptx::ld_shared_v4_f32(&shared.of_warps[0][chunk][lane * 4]);
#pragma unroll
  for (uint32_t warp = 1; warp < kWarps; ++warp) {
    const ptx::Float4 addend = ptx::ld_shared_v4_f32(&shared.of_warps[warp][chunk][lane * 4]);
    sum.x += addend.x, sum.y += addend.y, sum.z += addend.z, sum.w += addend.w;
  }
  return sum;
}

KERNEL(kNumThreads, 1) tf32_hc_prenorm_gemm_few(GRID_CONSTANT HcFewParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t warp = ptx::warp_index(), lane = ptx::lane_index();
  const uint32_t rank = kClusterK > 1 ? ptx::cluster_rank() : 0;
  if constexpr (kClusterK > 1) {
    if (warp == 0 && lane == 0) {
      ptx::mbarrier_init(&shared.received, 1);
      ptx::fence_mbarrier_init();
    }
    ptx::syncwarp();
    if (warp == 0 && lane == 0) expect_chunks<kSums>(&shared.received, rank);
    ptx::cluster_arrive();  // this CTA runs, so others may write to it
  }
  ptx::griddepcontrol_wait();
  const Work work(p, rank);
  Sums sums;
  multiply(p, work, warp, lane, sums);
  ptx::griddepcontrol_launch_dependents();
  sums.store(shared.of_warps[warp], lane);
  if constexpr (kClusterK > 1) ptx::cluster_wait();
  ptx::syncthreads();

#pragma unroll 1
  for (uint32_t chunk = warp; chunk < kChunks; chunk += kWarps) {
    const ptx::Float4 sum = sum_of_warps(shared, chunk, lane);
    if constexpr (kClusterK > 1)
      send_chunk<kSums>(shared.exchange, &shared.received, rank, 0, chunk, lane, sum.x, sum.y, sum.z, sum.w);
    else
      store_chunk(p, work, chunk, lane, sum);
  }
  if constexpr (kClusterK > 1) {
    // All warps wait: a CTA must not exit before all its chunks have arrived.
    ptx::mbarrier_wait_parity_cluster(&shared.received, 0);
#pragma unroll 1
    for (uint32_t i = warp; i < chunks_of_rank(kSums, rank); i += kWarps)
      store_chunk(p, work, rank * chunks_per_cta(kSums) + i, lane, sum_chunk<kSums>(shared.exchange, i, lane));
  }
}
