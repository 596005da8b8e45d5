// What Python passes in. The fields must match those in lab/sim/library.py.
#pragma once
#include <cstdint>

namespace sim {

struct Buffer {
  uint64_t base, bytes;
  const char* name;
  uint32_t is_writable;
  uint32_t is_dependent;  // the kernel before may still use it: not to be touched before griddepcontrol.wait
  uint32_t rank;          // whose memory it is
  // For each word, see peers.h:
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
  const double (*fp8)[256];   // what bytes stand for, by the type's bits of exponent
  uint32_t rank;              // where the kernel runs
  uint32_t (*other_ranks)();  // lets kernels of other ranks run; null: no other ranks. Not 0: one of them has failed
};

struct Stats {
  uint64_t steps, products, loads, stores, prefetches, to_peers;
};

// How a schedule is unfair. Fair schedules find little, because a race shows only if one side is late.
struct Bias {
  bool early_products = false;     // WGMMA runs when it is issued, else when it is waited for
  bool whole_warpgroup = false;    // no warp's product runs before all four warps have issued it
  bool late_answers = false;       // test_wait and try_wait may say no although the phase is over
  uint32_t load_delay = 400, store_delay = 400;
};

}  // namespace sim
