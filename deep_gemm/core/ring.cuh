// The ring of shared-memory slots between the producer and the math warps.
//
//   producer   waits for empty[stage], loads into the slot; the loaded bytes complete full[stage]
//   math warp  waits for full[stage], multiplies the slot, arrives at empty[stage] of every CTA that loads into it
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// One arrival: the producer arrives and announces the number of bytes that it loads.
constexpr uint32_t kFullArrivals = 1;
// One arrival of each math warp of all CTAs that share operands: with multicast, both CTAs' producers overwrite a slot.
constexpr uint32_t kEmptyArrivals = kMulticastCtas * kNumMathWarps;

struct Ring {
  uint64_t full[kNumStages];
  uint64_t empty[kNumStages];

  // `more_arrivals`: arrivals of warps that change a slot's loaded data before the slot counts as full.
  DEVICE void init(uint32_t more_arrivals = 0) {
    for (uint32_t stage = 0; stage < kNumStages; ++stage) {
      ptx::mbarrier_init(&full[stage], kFullArrivals + more_arrivals);
      ptx::mbarrier_init(&empty[stage], kEmptyArrivals);
    }
    ptx::fence_mbarrier_init();
  }
};

// A role's position in the ring. After each round over the stages, the role waits for phases of the other parity.
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;

  DEVICE RingPosition next() const {
    const bool wraps = stage + 1 == kNumStages;
    return {wraps ? 0 : stage + 1, parity ^ static_cast<uint32_t>(wraps)};
  }
};

// In the first round all slots are free: on a new barrier, a wait for parity 1 returns at once.
DEVICE void wait_until_free(Ring& ring, const RingPosition& at) {
  ptx::mbarrier_wait_parity(&ring.empty[at.stage], at.parity ^ 1);
}

DEVICE void wait_until_loaded(Ring& ring, const RingPosition& at) {
  ptx::mbarrier_wait_parity(&ring.full[at.stage], at.parity);
}

// Frees the slot: one lane arrives at each CTA that shares operands. `loaded` must be the last value that the warp read
// from the slot. The arrival depends on this value, so it cannot overtake the load.
DEVICE void release(Ring& ring, const RingPosition& at, uint32_t lane, float loaded) {
  if constexpr (kMulticastCtas == 1)
    ptx::mbarrier_arrive_after(&ring.empty[at.stage], loaded, lane == 0);
  else
    ptx::mbarrier_arrive_cluster_after(&ring.empty[at.stage], lane % kMulticastCtas, loaded, lane < kMulticastCtas);
}

// Frees a slot that only the tensor cores have read: the warp has loaded nothing from it.
DEVICE void release(Ring& ring, const RingPosition& at, uint32_t lane) {
  if constexpr (kMulticastCtas == 1) {
    if (lane == 0) ptx::mbarrier_arrive(&ring.empty[at.stage]);
  } else {
    if (lane < kMulticastCtas) ptx::mbarrier_arrive_cluster(&ring.empty[at.stage], lane);
  }
}
