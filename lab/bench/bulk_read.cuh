// Copies memory into shared memory by bulk copies and discards it, to time a kernel that only streams.
//
//   one thread of a CTA:  waits for a slot's last chunk, then requests the CTA's next chunk
#pragma once
#include "config.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"

struct ReadParams {
  const uint8_t* source;
  uint64_t bytes;  // a multiple of 16
};
#include "read_params_layout.cuh"  // asserts the layout that core/params.py packs

struct SharedStorage {
  alignas(128) uint8_t slots[kSlots][kChunk];
  uint64_t landed[kSlots];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "ReadConfig.shared_bytes and SharedStorage differ");

KERNEL(kNumThreads, 1) bulk_read(GRID_CONSTANT ReadParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  if (ptx::thread_index() != 0) return;
  for (uint32_t slot = 0; slot < kSlots; ++slot) ptx::mbarrier_init(&shared.landed[slot], 1);
  ptx::fence_mbarrier_init();
  ptx::griddepcontrol_wait();
  uint32_t asked = 0;  // number of chunks that this CTA has requested
  for (uint64_t at = uint64_t{ptx::block_index()} * kChunk; at < p.bytes; at += uint64_t{ptx::grid_size()} * kChunk) {
    const uint32_t slot = asked % kSlots, round = asked / kSlots;
    if (round > 0) ptx::mbarrier_wait_parity(&shared.landed[slot], (round - 1) % 2);
    const uint64_t left = p.bytes - at;
    const uint32_t bytes = left < kChunk ? static_cast<uint32_t>(left) : kChunk;
    ptx::mbarrier_arrive_expect_tx(&shared.landed[slot], bytes);
    ptx::bulk_load(&shared.landed[slot], shared.slots[slot], p.source + at, bytes);
    ++asked;
  }
  // A CTA must not exit before all copies into its shared memory have arrived.
  for (uint32_t chunk = asked > kSlots ? asked - kSlots : 0; chunk < asked; ++chunk)
    ptx::mbarrier_wait_parity(&shared.landed[chunk % kSlots], chunk / kSlots % 2);
}
