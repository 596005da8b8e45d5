// A meeting of the ranks of a node. In each call, a kernel of every rank writes into the other ranks' memory, and no
// rank continues before all ranks have written.
//
//   CTAs of this rank: stores --syncthreads--> count (acquire, release)
//   the last to count: epoch + 1 --release, system--> its flag on each rank;  waits for each rank's flag here (acquire)
//
// The stores of all CTAs are ordered before the last count, and the last count before the flags. So a rank that sees a
// flag sees the rows. Only one CTA of a rank waits, never its grid, so ranks that share a GPU cannot block each other.
// The next kernel may start only when this kernel has ended, so these kernels must not launch it early.
//
// Flags hold epochs, which number the calls, also of a replayed graph. A rank that waited too long writes the missing
// rank to `error` and joins no later meeting, since other ranks may still read memory that it would overwrite.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

constexpr uint32_t kMaxRanks = 8;  // the most ranks of a node

struct Meeting {
  uint8_t* rooms[kMaxRanks];  // each rank's memory that all ranks write, including this rank's
  uint64_t flags;             // byte of a room at which the flags [ranks] begin: the epoch of each rank
  uint64_t limit;             // the longest wait, in nanoseconds
  uint32_t* reached;          // two words of this rank: its epoch, and the number of CTAs that have counted
  uint32_t* error;            // 1 + the rank that did not arrive; 0: none
  uint32_t* report;           // a copy of `error` in host memory, which the host reads without waiting for this GPU
  uint32_t rank, ranks;
};

// Values that thread 0 passes to the threads of its CTA.
struct MeetingStorage {
  uint32_t is_last, epoch;
};

// Tells whether all ranks arrived at every earlier meeting.
DEVICE bool is_whole(const Meeting& m) { return ptx::ld_global_b32(m.error) == 0; }

DEVICE uint32_t* flag_of(const Meeting& m, uint32_t at, uint32_t of) {
  return reinterpret_cast<uint32_t*>(m.rooms[at] + m.flags) + of;
}

// Holds the meeting. All threads of all CTAs call it once, after all their reads and writes in rooms.
DEVICE void meet(const Meeting& m, MeetingStorage& shared) {
  const uint32_t thread = ptx::thread_index();
  ptx::syncthreads();
  if (thread == 0) {
    const bool is_last = ptx::atom_add_acq_rel_b32(m.reached + 1, 1) + 1 == ptx::grid_size();
    ptx::st_shared_b32(&shared.is_last, is_last);
    if (is_last) {
      const uint32_t epoch = ptx::ld_global_b32(m.reached) + 1;
      ptx::st_global_b32(m.reached, epoch);
      ptx::st_global_b32(m.reached + 1, 0);
      ptx::st_shared_b32(&shared.epoch, epoch);
    }
  }
  ptx::syncthreads();
  if (ptx::ld_shared_b32(&shared.is_last) == 0 || thread >= m.ranks) return;

  const uint32_t epoch = ptx::ld_shared_b32(&shared.epoch);
  ptx::st_release_sys_b32(flag_of(m, thread, m.rank), epoch);
  const uint64_t start = ptx::global_timer();
  // Another rank's epoch may be higher if a program repeats only this meeting, as in a timing of one part of a call.
  while (static_cast<int32_t>(ptx::ld_acquire_sys_b32(flag_of(m, m.rank, thread)) - epoch) < 0) {
    if (ptx::global_timer() - start <= m.limit) continue;
    ptx::st_global_b32(m.error, thread + 1);
    ptx::st_global_b32(m.report, thread + 1);
    return;
  }
}

// ---- Addresses of tokens' rows, and of routes' results, in the rooms of the ranks

// Returns the address of a slot's row. Slots number the tokens of all ranks, `max_tokens` for each rank.
DEVICE const uint8_t* row_of_slot(const Meeting& m, uint32_t slot, uint32_t max_tokens, uint32_t row_bytes) {
  return m.rooms[slot / max_tokens] + uint64_t{slot % max_tokens} * row_bytes;
}

// Returns the address of a slot's route's result. `results`: offset in a room of BF16 [max_tokens, topk, columns].
DEVICE uint64_t place_of_result(const Meeting& m, uint32_t slot, uint32_t route, uint32_t max_tokens, uint32_t topk,
                                uint32_t columns, uint64_t results) {
  const uint64_t place = (uint64_t{slot % max_tokens} * topk + route) * columns * 2;
  return reinterpret_cast<uint64_t>(m.rooms[slot / max_tokens]) + results + place;
}

// Stores the address of a row's result; 0 discards the result.
DEVICE void store_address(uint64_t* to, uint64_t address) {
  ptx::st_global_v2_b32(to, static_cast<uint32_t>(address), static_cast<uint32_t>(address >> 32));
}
