// The parameters of a product for fp8_gemm_decode; gemm/launch.py packs them. config.cuh names one of decode/one.cuh,
// decode/heads.cuh, decode/skip_mid.cuh (into the parts of heads) and decode/rows.cuh (groups of rows). This file adds
// the parameters that its products need besides; fp8_gemm_decode.cuh checks its members.
#pragma once
#include "config.cuh"
#include "ptx/tma.cuh"

struct DecodeMaps {
  // Boxes have no more rows than the tensors: the hardware takes about 2 ns for each row that lies outside.
  ptx::TensorMap map_a, map_b;
};

struct DecodeProduct {
  const float *sfa, *sfb;
  uint8_t* d;
  const uint8_t* c;
  uint64_t d_pitch, c_pitch;  // in elements
  uint32_t sfa_stride_m, sfa_stride_k, sfb_stride_n, sfb_stride_k;
  uint32_t m, n, k;
  uint32_t slot_bytes;  // of one box of A and one of B
  // Nonzero if the kernel ahead writes only A and its scales, and this one starts only when all work before that kernel
  // is over. Then B, and the layout of groups, may be loaded before griddepcontrol_wait.
  uint32_t weight_is_ready;
  uint32_t words;  // whose scales are words of UE8M0: see ue8m0.cuh
};
