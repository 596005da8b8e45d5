// Makes the ranks of a node wait for each other after their products. Then each room holds all its results of this call, and
// all received rows have been read. The earlier kernels have ended, so their stores are visible before this kernel's flags.
#pragma once
#include "config.cuh"
#include "meeting.cuh"

struct MeetParams {
  Meeting meeting;
};
#include "meet_params_layout.cuh"  // asserts the layout that core/params.py packs

struct SharedStorage {
  MeetingStorage meeting;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "MeetConfig.shared_bytes and SharedStorage differ");

KERNEL(kNumThreads, 1) meet_ranks(GRID_CONSTANT MeetParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  ptx::griddepcontrol_wait();
  if (is_whole(p.meeting)) meet(p.meeting, shared.meeting);
}
