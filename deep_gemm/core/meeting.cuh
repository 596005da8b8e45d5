// How the ranks of a node meet: in each call a kernel of every rank writes into the memory of the others, and no rank goes on
// before all have written.
//
//   blocks of this rank: stores --syncthreads--> count (acquire, release)
//   the last to count:   epoch + 1 --release, system--> its flag on each rank;  waits for each rank's flag here (acquire)
//
// The stores of all blocks come before the last count, and the last count before the flags, so a rank that sees a flag
// sees the rows. Only one block of a rank waits, never its grid, so ranks that share a GPU cannot keep each other from
// running. The next kernel starts when this one has ended, so these kernels do not let it start early.
//
// Flags hold epochs: they number calls, including the calls of a replayed graph. A rank that waited too long names the
// missing rank in `error` and joins no later meeting, since other ranks may still read memory that it would overwrite.
#pragma once
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "types.cuh"

constexpr uint32_t kMaxRanks = 8;  // of a node

struct Meeting {
  uint8_t* rooms[kMaxRanks];  // the memory of each rank that all write to, this rank's too
  uint64_t flags;             // byte of a room: the epochs [ranks] that the ranks have reached
  uint64_t limit;             // of a wait, in nanoseconds
  uint32_t* reached;          // of this rank: its epoch, and how many blocks have counted
  uint32_t* error;            // 1 + the rank that did not come; 0: none
  uint32_t* report;           // the same in the host's memory, where it is read without waiting for this GPU
  uint32_t rank, ranks;
};

// Facts that thread 0 hands to the threads of its block.
struct MeetingStorage {
  uint32_t is_last, epoch;
};

// Whether all ranks came to every meeting before this one.
DEVICE bool is_whole(const Meeting& m) { return ptx::ld_global_b32(m.error) == 0; }

DEVICE uint32_t* flag_of(const Meeting& m, uint32_t at, uint32_t of) {
  return reinterpret_cast<uint32_t*>(m.rooms[at] + m.flags) + of;
}

// All threads of all blocks call this once, after all their writes and reads in rooms.
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
  // A rank may be ahead where ranks meet this way alone, as when a part of a call is timed.
  while (static_cast<int32_t>(ptx::ld_acquire_sys_b32(flag_of(m, m.rank, thread)) - epoch) < 0) {
    if (ptx::global_timer() - start <= m.limit) continue;
    ptx::st_global_b32(m.error, thread + 1);
    ptx::st_global_b32(m.report, thread + 1);
    return;
  }
}
