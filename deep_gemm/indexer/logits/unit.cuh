// Logits of 64 keys for a unit of tokens: sum over heads h of max(0, key . q[token, h]) * weight[token, h].
//
//   multiply   64 keys (rows of A) x kTokens * kHeads columns (rows of B, token by token), on the tensor cores
//   weigh      in each thread, over its columns of each token: 2 rows of keys, a fourth of the columns
//   reduce     over the 4 lanes that share these rows; each lane ends with one row and every other token
//
// Each sum has a fixed order, so its bits are the same each time.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "types.cuh"

// Weights of the columns of a unit, in shared memory, in the order of WGMMA's accumulators.
//
//   given   weights[token, head]: column = token * heads + head
//   laid    of each 8 columns, a lane of quarter q = lane % 4 holds columns 2q and 2q + 1. For each 16 columns, or pair
//           of eights, it finds its 4 weights in 16 bytes: [pair][q]{2q, 2q + 1, 8 + 2q, 8 + 2q + 1}
//
// So a warp reads the weights of 16 columns in one load of 64 bytes, which has no bank conflicts.

// Floats for the weights of `columns` columns, whole pairs of eights; the last pair's missing weights are never used.
DEVICE_CONSTEXPR uint32_t laid_weights(uint32_t columns) { return ceil_div(columns, 16) * 16; }

// Returns the position of a column's weight, in floats from the first of its unit.
DEVICE_CONSTEXPR uint32_t place_of_weight(uint32_t column) {
  return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

// A lane's weights for a fourth of a unit's columns, loaded once and kept in registers.
template <uint32_t kColumns>
struct WeightsInRegisters {
  ptx::Float4 pairs[ceil_div(kColumns, 16)];

  DEVICE void load(const float* laid, uint32_t lane) {
    const uint32_t address = ptx::smem_address(laid) + lane % 4 * 16;
#pragma unroll
    for (uint32_t i = 0; i < ceil_div(kColumns, 16); ++i) pairs[i] = ptx::ld_shared_v4_f32(address + i * 64);
  }
};

// kDepth: bytes of a key, and of the swizzle. max(0, x) is computed as half of x + |x|, which is exact and uses another
// unit of the SM than max. The weights include the factor of one half.
template <uint32_t kTokens_, uint32_t kHeads, uint32_t kDepth>
struct LogitUnit {
  static constexpr uint32_t kTokens = kTokens_, kColumns = kTokens * kHeads;
  static_assert(kColumns % 8 == 0 && kColumns <= 256, "a WGMMA has 8 to 256 columns");
  static_assert(kHeads % 8 == 0, "eight columns belong to one token");
  static constexpr uint32_t kAccumulators = kColumns / 2;
  static constexpr uint32_t kBytes = kColumns * kDepth;  // bytes of q
  static constexpr uint32_t kWeights = laid_weights(kColumns);
  static constexpr uint32_t kLogits = ceil_div(kTokens, 2);  // logits of a lane

  float accumulators[kAccumulators];

  // Returns the number that shared memory holds for a weight.
  DEVICE static float weight(float given) { return given * 0.5f; }

  // Starts the product of the 64 keys and the columns of q (low words of their descriptors), and commits it as a group.
  DEVICE void multiply(uint32_t keys_low, uint32_t q_low) {
    ptx::wgmma_fence();
    ptx::wgmma_m64_e4m3<kColumns, kDepth>(accumulators, keys_low, q_low);
    ptx::wgmma_commit_group();
  }

  // After the wait for the product: computes this lane's logits, of key row_of_lane and tokens token_of_lane(0), ...
  DEVICE void reduce(const WeightsInRegisters<kColumns>& weights, uint32_t lane, float (&logits)[kLogits]) {
    ptx::fence_registers(accumulators);
    float sums[2][kTokens];
    weigh(weights, sums);
    // Each lane sends away the row that it does not keep, and then every other token of its row.
    const bool has_second_row = lane & 2, has_odd = lane & 1;
    float rows[kTokens];
#pragma unroll
    for (uint32_t t = 0; t < kTokens; ++t) {
      const float kept = has_second_row ? sums[1][t] : sums[0][t], given = has_second_row ? sums[0][t] : sums[1][t];
      rows[t] = kept + ptx::shfl_xor_sync(given, 2);
    }
#pragma unroll
    for (uint32_t i = 0; i < kLogits; ++i) {
      const uint32_t even = 2 * i, odd = 2 * i + 1 < kTokens ? 2 * i + 1 : even;
      const float kept = has_odd ? rows[odd] : rows[even], given = has_odd ? rows[even] : rows[odd];
      logits[i] = kept + ptx::shfl_xor_sync(given, 1);
    }
  }

 private:
  DEVICE void weigh(const WeightsInRegisters<kColumns>& weights, float (&sums)[2][kTokens]) {
#pragma unroll
    for (uint32_t t = 0; t < kTokens; ++t) sums[0][t] = sums[1][t] = 0;
#pragma unroll
    for (uint32_t pair = 0; pair < ceil_div(kColumns, 16); ++pair) {
      const ptx::Float4 w = weights.pairs[pair];
      add_eight(pair * 2, w.x, w.y, sums);
      if (pair * 2 + 1 < kColumns / 8) add_eight(pair * 2 + 1, w.z, w.w, sums);
    }
  }

  // Adds two columns in each of two rows. A NaN stays NaN.
  DEVICE void add_eight(uint32_t eight, float first, float second, float (&sums)[2][kTokens]) {
    const uint32_t token = eight * 8 / kHeads;
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row) {
      float& sum = sums[row][token];
      sum = ptx::fma_rn(twice_relu(accumulators[eight * 4 + row * 2]), first, sum);
      sum = ptx::fma_rn(twice_relu(accumulators[eight * 4 + row * 2 + 1]), second, sum);
    }
  }

  DEVICE static float twice_relu(float x) { return ptx::add_rn(x, ptx::abs_f32(x)); }
};

// Returns the key, of its warpgroup's 64, whose logits a lane of warp `warp` % 4 has after `reduce`.
DEVICE uint32_t row_of_lane(uint32_t warp, uint32_t lane) { return warp % 4 * 16 + lane / 4 + (lane & 2) * 4; }

// Returns the token of a lane's i-th logit. If the number of tokens is odd, a lane's last logit may have no token.
DEVICE uint32_t token_of_lane(uint32_t i, uint32_t lane) { return 2 * i + (lane & 1); }
