// Copies a rank's room word by word. It stands for the kernels that read the room between two meetings.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

struct KeepParams {
  const uint32_t* room;
  uint32_t* kept;
  uint32_t words;
};

KERNEL(64, 1) keep_room(GRID_CONSTANT KeepParams p) {
  ptx::griddepcontrol_wait();
  for (uint32_t i = ptx::thread_index(); i < p.words; i += 64) ptx::st_global_b32(p.kept + i, ptx::ld_global_b32(p.room + i));
}
