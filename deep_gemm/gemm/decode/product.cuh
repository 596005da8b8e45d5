// The parameters of a product for fp8_gemm_decode; gemm/launch.py packs them. config.cuh names one of decode/one.cuh,
// decode/heads.cuh, decode/skip_mid.cuh (D in parts of heads) and decode/rows.cuh (groups of rows). That file adds the
// further parameters of its products; fp8_gemm_decode.cuh checks its members.
#pragma once
#include "config.cuh"
#include "ptx/tma.cuh"

struct DecodeMaps {
  // Boxes have no more rows than the tensors: TMA needs about 2 ns for each row that is outside.
  ptx::TensorMap map_a, map_b;
};

struct DecodeProduct {
  const float *sfa, *sfb;
  uint8_t* d;
  const uint8_t* c;
  uint64_t d_pitch, c_pitch;  // in elements
  uint32_t sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
  uint32_t slot_bytes;  // bytes of one box of A and one of B
  // Nonzero if the previous kernel writes only A and its scales, and this kernel starts only when all work before the
  // previous kernel is finished. Then B, and the layout of groups, may be loaded before griddepcontrol_wait.
  uint32_t weight_is_ready;
  uint32_t words;  // the sides whose scales are words of UE8M0: see types.cuh
};
