// Parameters of a launch of fp8_mqa_logits.
#pragma once
#include "ptx/tma.cuh"

struct MqaParams {
  ptx::TensorMap map_q;       // E4M3 [tokens * heads, depth], boxes of a unit's columns
  ptx::TensorMap map_keys;    // E4M3 [keys, depth], boxes of a block
  ptx::TensorMap map_scales;  // FP32 [keys]
  const float* weights;       // [tokens, heads]
  const int32_t* starts;      // [tokens]: the first key of each token's range; `ends`: the key after its last
  const int32_t* ends;
  uint8_t* logits;            // [tokens, ...] in rows of logits_pitch bytes
  uint64_t weights_pitch;     // in elements
  uint64_t logits_pitch;
  uint32_t tokens, keys;
  uint32_t row_keys;          // columns of a compressed row
};
#include "mqa_params_layout.cuh"  // asserts that the layout of MqaParams is what core/params.py packs
