// The arguments from Python. The fields must match those in lab/sim/library.py.
#pragma once
#include <cstdint>

namespace sim {

struct Buffer {
  uint64_t base, bytes;
  const char* name;
  uint32_t is_writable;
  uint32_t is_dependent;  // the previous kernel may still use it: no access before griddepcontrol.wait
  uint32_t rank;          // the rank that owns the memory
  // For each word (see peers.h):
  uint8_t* news;      // the peer that wrote it, until this rank acquires from that peer
  uint8_t* held;      // bit r: its own rank wrote it, and rank r may not read it yet
  uint8_t* released;  // bit r: its own rank released it to rank r, which must acquire before it reads
};

struct Launch {
  uint64_t seed, max_steps;
  uint32_t grid, cluster_size, threads, shared_bytes, num_sms;
  int32_t schedule;  // a value of Schedule, or -1 to draw one from the seed
  uint32_t truncate;
  uint32_t num_buffers;
  const Buffer* buffers;
  void** arguments;
  const double (*fp8)[256];   // the number that each byte means, by the type's bits of exponent
  uint32_t rank;              // the rank that runs the kernel
  uint32_t (*other_ranks)();  // runs kernels of other ranks; returns non-zero if one of them has failed; null: no other ranks
};

struct Stats {
  uint64_t steps, products, loads, stores, prefetches, to_peers;
};

// The unfairness of a schedule. Fair schedules find little, because a race shows only if one side is late.
struct Bias {
  bool early_products = false;     // WGMMA runs when it is issued, else at the wait for it
  bool whole_warpgroup = false;    // no warp's product runs before all four warps have issued it
  bool late_answers = false;       // test_wait and try_wait may return false although the phase is over
  uint32_t load_delay = 400, store_delay = 400;
};

}  // namespace sim
