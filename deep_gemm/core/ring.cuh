// The ring of shared-memory slots between the producer and the math warps.
//
//   producer   waits for empty[stage], loads into the slot; the bytes that land complete full[stage]
//   math warp  waits for full[stage], multiplies the slot, arrives at empty[stage] of every CTA that loads into it
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"

// One arrival, the producer's, which announces how many bytes will land.
constexpr uint32_t kFullArrivals = 1;
// Each math warp of each CTA that shares operands: with multicast a slot is overwritten by both CTAs' producers.
constexpr uint32_t kEmptyArrivals = kMulticastCtas * kNumMathWarps;

struct Ring {
  uint64_t full[kNumStages];
  uint64_t empty[kNumStages];

  // `more_arrivals`: arrivals of the warps that finish a slot's data after it landed and before the slot is full.
  DEVICE void init(uint32_t more_arrivals = 0) {
    for (uint32_t stage = 0; stage < kNumStages; ++stage) {
      ptx::mbarrier_init(&full[stage], kFullArrivals + more_arrivals);
      ptx::mbarrier_init(&empty[stage], kEmptyArrivals);
    }
    ptx::fence_mbarrier_init();
  }
};

// Where one role stands in the ring. Each pass over the stages flips the parity of the phases it waits for.
struct RingPosition {
  uint32_t stage = 0;
  uint32_t parity = 0;

  DEVICE RingPosition next() const {
    const bool wraps = stage + 1 == kNumStages;
    return {wraps ? 0 : stage + 1, parity ^ static_cast<uint32_t>(wraps)};
  }
};

// The first pass finds all slots free: a barrier that was never completed is past the phase of the other parity.
DEVICE void wait_until_free(Ring& ring, const RingPosition& at) {
  ptx::mbarrier_wait_parity(&ring.empty[at.stage], at.parity ^ 1);
}

DEVICE void wait_until_loaded(Ring& ring, const RingPosition& at) {
  ptx::mbarrier_wait_parity(&ring.full[at.stage], at.parity);
}

// Gives the slot back: one lane arrives at each sharing CTA. `loaded` must be the last value the warp read from the slot:
// the arrival depends on it, so it cannot overtake the load.
DEVICE void release(Ring& ring, const RingPosition& at, uint32_t lane, float loaded) {
  if constexpr (kMulticastCtas == 1)
    ptx::mbarrier_arrive_after(&ring.empty[at.stage], loaded, lane == 0);
  else
    ptx::mbarrier_arrive_cluster_after(&ring.empty[at.stage], lane % kMulticastCtas, loaded, lane < kMulticastCtas);
}

// The same for a warp that has loaded nothing of the slot, which only the tensor cores have read.
DEVICE void release(Ring& ring, const RingPosition& at, uint32_t lane) {
  if constexpr (kMulticastCtas == 1) {
    if (lane == 0) ptx::mbarrier_arrive(&ring.empty[at.stage]);
  } else {
    if (lane < kMulticastCtas) ptx::mbarrier_arrive_cluster(&ring.empty[at.stage], lane);
  }
}
