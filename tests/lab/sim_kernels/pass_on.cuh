// Each rank writes `words` words into the next rank's memory, sets its flag, and copies the words that it received.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct PassParams {
  uint32_t *there, *flag_there;  // in the next rank's memory
  uint32_t *here, *flag_here, *count, *out;
  uint32_t words, value, epoch;
};

KERNEL(64, 1) pass_on(GRID_CONSTANT PassParams p) {
  const uint32_t first = ptx::block_index() * 64 + ptx::thread_index(), threads = ptx::grid_size() * 64;
  for (uint32_t i = first; i < p.words; i += threads) ptx::st_global_b32(p.there + i, p.value + i);
  ptx::syncthreads();
  if (ptx::thread_index() != 0) return;
  if (ptx::atom_add_acq_rel_b32(p.count, 1) + 1 != ptx::grid_size()) return;
  ptx::st_release_sys_b32(p.flag_there, p.epoch);
  while (ptx::ld_acquire_sys_b32(p.flag_here) != p.epoch) {
  }
  for (uint32_t i = 0; i < p.words; ++i) ptx::st_global_b32(p.out + i, ptx::ld_global_b32(p.here + i));
}
