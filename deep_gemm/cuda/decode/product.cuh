// What fp8_gemm_decode is given of a product, wherever its columns go; kernels/params.py packs it. A destination adds what
// it needs, and calls the whole `Params`.
#pragma once
#include "ptx/tma.cuh"

struct DecodeProduct {
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
