// FP8 values and their scales, one for each row and 128 columns ("1x128"): activations, as the products take them.
//
//   rows of x [m, k]   -> registers -> largest magnitude of 128 columns -> scale      -> shared memory -> scales
//                         the same registers, divided by the scale      -> FP8 values
//
// A team of lanes takes 128 columns of a row, a block, at a time. A CTA takes kRows rows of kBlocks blocks, and all of its
// loads are under way before it looks at the first: only so does memory run at its full rate. Scales go through shared memory,
// because those of one block lie beside each other in memory for successive rows, which different teams cast.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct CastParams {
  const uint8_t* x;
  uint8_t* values;
  float* scales;
  uint64_t x_pitch, values_pitch;              // from a row to the next, in elements
  uint64_t scales_stride_m, scales_stride_k;  // the same for scales, and from a block to the next
  uint32_t m, k;
  float min_amax;       // the largest magnitude of a block counts as at least this
  uint32_t rounds_up;  // scales are powers of two
};
#include "cast_params_layout.cuh"  // asserts that it lies as kernels/params.py packs it

constexpr uint32_t kBlockK = 128;
constexpr float kLargest = 448.f;              // of E4M3
constexpr float kLeastScale = 1.1754943508e-38f;  // 2^-126, the smallest normal number
constexpr uint32_t kInfinity = 0x7f800000;

// A lane takes kVector elements at once, and so often that the team has all of a block.
constexpr uint32_t kLanes = kBlockK / kVector < 32 ? kBlockK / kVector : 32;
constexpr uint32_t kChunks = kBlockK / kVector / kLanes;
constexpr uint32_t kTeams = kNumThreads / kLanes;
constexpr uint32_t kPasses = kRows * kBlocks / kTeams;
static_assert(kPasses * kTeams == kRows * kBlocks, "each team has as many blocks as the others");

struct SharedStorage {
  float scales[kBlocks][kRows];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "CastConfig.shared_bytes and SharedStorage differ");

// What a lane has of a block: the elements from column (chunk * kLanes + lane) * kVector on.
struct Piece {
  float values[kChunks][kVector];
};

// One element, or 16 bytes of them at a multiple of 16 bytes. Their casts go to as many bytes, at a multiple of as many.
template <uint32_t kCount>
DEVICE void load_chunk(const uint8_t* from, float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    if constexpr (kInputIsFp32)
      values[0] = ptx::ld_global_nc_f32(from);
    else
      values[0] = kInputIsFp16 ? ptx::unpack_f16(ptx::ld_global_nc_b16(from)).x
                               : ptx::unpack_bf16(ptx::ld_global_nc_b16(from)).x;
  } else {
    const ptx::Uint4 loaded = ptx::ld_global_nc_v4_b32(from);
    const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      if constexpr (kInputIsFp32) {
        values[i] = ptx::float_of(words[i]);
      } else {
        const ptx::Float2 pair = kInputIsFp16 ? ptx::unpack_f16(words[i / 2]) : ptx::unpack_bf16(words[i / 2]);
        values[i] = i % 2 == 0 ? pair.x : pair.y;
      }
    }
  }
}

template <uint32_t kCount>
DEVICE void store_chunk(uint8_t* to, const float (&values)[kCount], float scale) {
  if constexpr (kCount == 1) {
    ptx::st_global_b8(to, ptx::pack_e4m3(ptx::div_rn(values[0], scale), 0.f) & 0xff);
  } else {
    uint32_t words[kCount / 4];
#pragma unroll
    for (uint32_t i = 0; i < kCount / 4; ++i) {
      const float* v = &values[i * 4];
      words[i] = ptx::pack_e4m3(ptx::div_rn(v[0], scale), ptx::div_rn(v[1], scale)) |
                 ptx::pack_e4m3(ptx::div_rn(v[2], scale), ptx::div_rn(v[3], scale)) << 16;
    }
    if constexpr (kCount == 8)
      ptx::st_global_v2_b32(to, words[0], words[1]);
    else
      ptx::st_global_b32(to, words[0]);
  }
}

// The largest finite magnitude of a block, to all lanes of its team. Bits of positive numbers are in their order.
DEVICE float amax_of(const Piece& piece) {
  uint32_t most = 0;
#pragma unroll
  for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
    for (uint32_t i = 0; i < kVector; ++i) {
      const uint32_t magnitude = ptx::bits_of(piece.values[chunk][i]) & 0x7fffffff;
      most = magnitude < kInfinity && magnitude > most ? magnitude : most;
    }
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    const uint32_t other = ptx::shfl_sync(most, ptx::lane_index() ^ distance);
    most = other > most ? other : most;
  }
  return ptx::float_of(most);
}

DEVICE float scale_of(const CastParams& p, float amax) {
  amax = amax < p.min_amax ? p.min_amax : amax;
  const float quotient = ptx::div_rn(amax, kLargest), scale = quotient < kLeastScale ? kLeastScale : quotient;
  const uint32_t power = (ptx::bits_of(scale) + 0x7fffff) & kInfinity;  // a carry out of the mantissa is the next one
  return amax == 0.f ? 1.f : p.rounds_up ? ptx::float_of(power) : scale;
}

KERNEL(kNumThreads, kCtasPerSm) cast_rows(GRID_CONSTANT CastParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  const uint32_t tiles_k = ceil_div(ceil_div(p.k, kBlockK), kBlocks);
  const uint32_t first_row = ptx::block_index() / tiles_k * kRows, first_block = ptx::block_index() % tiles_k * kBlocks;
  const uint32_t team = ptx::thread_index() / kLanes, lane = ptx::thread_index() % kLanes;

  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait

  Piece pieces[kPasses];
#pragma unroll
  for (uint32_t pass = 0; pass < kPasses; ++pass) {
    const uint32_t pair = pass * kTeams + team, row = first_row + pair / kBlocks;
#pragma unroll
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t column = (first_block + pair % kBlocks) * kBlockK + (chunk * kLanes + lane) * kVector;
#pragma unroll
      for (float& value : pieces[pass].values[chunk]) value = 0.f;
      if (row < p.m && column < p.k)
        load_chunk(p.x + (row * p.x_pitch + column) * kInputBytes, pieces[pass].values[chunk]);
    }
  }
#pragma unroll
  for (uint32_t pass = 0; pass < kPasses; ++pass) {
    const uint32_t pair = pass * kTeams + team, row = first_row + pair / kBlocks;
    const float scale = scale_of(p, amax_of(pieces[pass]));
    if (lane == 0) ptx::st_shared_f32(&shared.scales[pair % kBlocks][pair / kBlocks], scale);
#pragma unroll
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      const uint32_t column = (first_block + pair % kBlocks) * kBlockK + (chunk * kLanes + lane) * kVector;
      if (row < p.m && column < p.k) store_chunk(p.values + row * p.values_pitch + column, pieces[pass].values[chunk], scale);
    }
  }
  ptx::syncthreads();

  // Successive threads store to places beside each other, whichever way the scales lie.
  const bool is_m_major = p.scales_stride_m == 1;
  for (uint32_t i = ptx::thread_index(); i < kRows * kBlocks; i += kNumThreads) {
    const uint32_t row = is_m_major ? i % kRows : i / kBlocks, block = is_m_major ? i / kRows : i % kBlocks;
    if (first_row + row < p.m && (first_block + block) * kBlockK < p.k)
      ptx::st_global_f32(p.scales + (first_row + row) * p.scales_stride_m + (first_block + block) * p.scales_stride_k,
                         ptx::ld_shared_f32(&shared.scales[block][row]));
  }
}
