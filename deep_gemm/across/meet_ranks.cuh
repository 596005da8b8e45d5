// Lets the ranks of a node meet after their products: then all results of this call are in the rooms that they belong to, and
// all rows that came have been read. The kernels ahead have ended, so their stores come before this kernel's flags.
#pragma once
#include "config.cuh"
#include "meeting.cuh"

struct MeetParams {
  Meeting meeting;
};
#include "meet_params_layout.cuh"  // asserts that it lies as core/params.py packs it

struct SharedStorage {
  MeetingStorage meeting;
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "MeetConfig.shared_bytes and SharedStorage differ");

KERNEL(kNumThreads, 1) meet_ranks(GRID_CONSTANT MeetParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  ptx::griddepcontrol_wait();
  if (is_whole(p.meeting)) meet(p.meeting, shared.meeting);
}
