// What a launch of fp8_paged_mqa_logits is told.
#pragma once
#include "ptx/tma.cuh"

struct PagedParams {
  ptx::TensorMap map_q;       // E4M3 [sequences * next_n * heads, depth], boxes of a unit's columns
  ptx::TensorMap map_keys;    // E4M3 [blocks of the cache, page, depth], boxes of a page
  ptx::TensorMap map_scales;  // FP32 [blocks of the cache, page]
  const float* weights;       // [sequences * next_n, heads]
  const int32_t* contexts;    // [sequences, next_n], or [sequences]: contexts_step is 0
  const int32_t* table;       // [sequences, pages]: blocks of the cache
  const int32_t* schedule;    // [shares + 1, 2]: sequence and segment with which a share begins
  uint8_t* logits;            // [sequences * next_n, ...] in rows of logits_pitch bytes
  uint64_t weights_pitch;     // elements, as the next
  uint64_t table_pitch;
  uint64_t logits_pitch;
  uint32_t sequences, cache_blocks;
  uint32_t contexts_pitch, contexts_step;  // elements from sequence to sequence, from token to token
  uint32_t most_keys;                      // what both the rows of logits and the table have room for
  uint32_t splits;                         // CTAs of a share, 1 or 2
};
#include "paged_params_layout.cuh"  // asserts that it lies as core/params.py packs it
