// Stores given results of experts at the addresses from gather_rows, as the second product does.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct StoreParams {
  const uint8_t* y;  // BF16 [rows, n]
  const uint8_t* addresses;
  const int32_t* token_of;
  uint32_t rows, n;
};

KERNEL(64, 1) store_results(GRID_CONSTANT StoreParams p) {
  ptx::griddepcontrol_wait();
  for (uint32_t row = 0; row < p.rows; ++row) {
    if (ptx::ld_global_i32(p.token_of + row) < 0) return;
    const ptx::Uint2 address = ptx::ld_global_v2_b32(p.addresses + row * 8);
    auto* to = reinterpret_cast<uint8_t*>(uint64_t{address.y} << 32 | address.x);
    if (to == nullptr) continue;
    for (uint32_t at = ptx::thread_index() * 16; at < p.n * 2; at += 64 * 16) {
      const ptx::Uint4 piece = ptx::ld_global_v4_b32(p.y + row * p.n * 2 + at);
      ptx::st_global_v4_b32(to + at, piece.x, piece.y, piece.z, piece.w);
    }
  }
}
