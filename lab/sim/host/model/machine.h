// The state of the simulated GPU during a launch.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "context.h"
#include "launch_types.h"

namespace sim {

// A block's shared memory begins at this address of the shared window, as on the GPU. The system uses the first KiB.
constexpr uint32_t kSharedBase = 1024;
constexpr uint32_t kSharedLimit = 232448;
constexpr uint32_t kLanes = 32;
constexpr uint32_t kNamedBarriers = 16;
constexpr uint32_t kRegistersPerSm = 65536;

struct Fiber;
struct Cta;
struct Cluster;
using WaitList = std::vector<Fiber*>;

// The event that a fiber waits for. `details` is called only for a report.
struct Wait {
  const char* what = nullptr;
  std::function<std::string()> details;
};

struct Range {
  uint32_t offset, bytes;
};

// A write of st.async during a phase of an mbarrier, by the generic proxy. After a wait, ordinary loads see it. TMA and
// WGMMA see it only if a thread that has waited also runs a fence.
struct Sent {
  uint64_t phase;
  Range range;
  uint8_t bytes[16];
  bool is_shown;
};

struct Mbarrier {
  uint32_t offset;  // in shared memory
  uint32_t expected, pending;
  int64_t bytes = 0;  // announced, but not yet arrived
  uint64_t phase = 0;
  bool is_fenced = false;
  WaitList waiting;
  // Data that TMA has written in a phase, but that ordinary loads cannot see yet, because no thread has waited.
  std::vector<std::pair<uint64_t, Range>> landed;
  std::vector<Sent> sent;
  std::vector<uint64_t> known;  // the knowledge of the arrived threads
};

// The true values of accumulators, while the kernel's registers are poisoned.
struct Accumulators {
  uint32_t count = 0;       // per lane
  uint32_t saved = 0;       // mask of lanes whose values are saved here
  uint64_t last_product = 0;
  float* registers[kLanes];
  std::vector<float> values;  // by lane
};

// The operands of a WGMMA: 32 bytes of each along k, with the type and the majors from the instruction.
struct ProductKind {
  const char* name;
  bool is_bf16, a_is_mn_major, b_is_mn_major;
  bool has_registers = false;       // A is in the lanes' registers
  uint32_t exponent_bits_of_b = 4;  // for an FP8 B; A is E4M3

  bool operator==(const ProductKind&) const = default;
  uint32_t depth() const { return is_bf16 ? 16 : 32; }
};
inline constexpr ProductKind kE4m3OfRegisters{"wgmma_registers_m64k32_e4m3", false, false, false, true};

// One warp's part of a WGMMA: 16 rows.
struct Product {
  Accumulators* d;
  ProductKind kind;
  uint32_t n;
  uint64_t descriptor_a, descriptor_b;
  bool accumulate;
  uint64_t number;  // number of products of the warp so far
  uint32_t registers[4][kLanes] = {};  // A, if it is in the lanes' registers
};

// A thread's knowledge: for each fiber's place, the number of that fiber's stores to peers that the thread knows of.
using Known = std::vector<uint64_t>;

struct Warp {
  // The operation at which lanes meet. Values of two generations, because slow lanes may still read the older values.
  const char* operation = nullptr;
  uint32_t arrived = 0, exited = 0;
  uint64_t generation = 0;
  uint64_t values[2][kLanes];
  Known known[2];  // the knowledge of the lanes that meet at syncwarp
  WaitList waiting;

  uint32_t elected = 0;
  uint32_t registers = 0;

  uint64_t issued = 0;            // number of products
  std::deque<Product> products;   // issued, but not executed yet
  std::deque<uint64_t> groups;    // the value of `issued` at each commit that no wait has covered
  std::map<float*, Accumulators> in_flight;   // by lane 0's registers
  std::map<float*, uint64_t> handed_back;     // by lane 0's registers: the value of `fences` when the kernel got them back
  uint64_t fences = 0;
};

struct Warpgroup {
  struct Operands {
    ProductKind kind;
    uint64_t a, b;
    uint32_t n;
    bool accumulate;
  };
  std::vector<Operands> log;
  WaitList waiting;
};

// A store to another rank's memory that has not arrived yet.
struct PeerStore {
  uint64_t address;
  uint32_t size;
  uint8_t bytes[16];
  uint8_t* news;
  bool has_landed = false;
};

struct NamedBarrier {
  uint32_t threads = 0, arrived = 0;
  Known known[2];  // of the threads that arrive in even and in odd generations
  uint64_t generation = 0;
  WaitList waiting;
};

struct Cta {
  uint32_t index, rank;
  Cluster* cluster;
  uint8_t* generic;  // the bytes that ordinary loads and stores see
  uint8_t* async;    // the bytes that TMA and WGMMA see
  uint32_t live_threads;
  uint32_t free_registers = 0;
  uint32_t loads_in_flight = 0;
  bool dependency_resolved = false;  // griddepcontrol.wait has returned
  std::vector<std::unique_ptr<Mbarrier>> mbarriers;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  NamedBarrier named[kNamedBarriers];
  bool agreed[2] = {};  // for even and odd generations: all threads passed true to syncthreads_and
  WaitList waiting_for_registers;
};

struct Cluster {
  std::vector<Cta*> ctas;
  uint32_t live_threads = 0, arrived = 0;
  uint64_t generation = 0;  // the generation of the cluster's barrier
  WaitList waiting;
};

// The TMA stores of one commit: the number that must still read shared memory, and the number that must still write.
struct StoreGroup {
  uint32_t unread = 0, unwritten = 0;
  WaitList waiting;
};

// A cp.async: bytes to write to shared memory.
struct Copy {
  uint32_t offset;
  uint8_t bytes[16];
};

struct Fiber {
  Context context;
  Cta* cta = nullptr;
  uint32_t thread = 0;
  bool is_done = false, is_slow = false, is_polling = false;
  Wait wait;
  std::vector<Range> unfenced;  // generic writes that the async proxy cannot see yet
  std::vector<Mbarrier*> unfenced_barriers;
  std::vector<std::function<void(std::shared_ptr<StoreGroup>)>> uncommitted;
  std::vector<Copy> copies;  // issued copies that no wait has covered
  std::deque<std::shared_ptr<StoreGroup>> store_groups;
  std::vector<const void*> unreleased_maps;  // tensor maps that this thread has written
  std::set<const void*> acquired_maps;       // maps that kernels made and this thread may use
  uint64_t fenced_at = 0;    // `acquired` at this thread's last fence for TMA's loads from global memory
  bool has_arrived = false;  // at the cluster's barrier
  uint64_t arrived_generation = 0;
  Known known;
  Known fenced, told_fenced, for_tma;  // of stores to memory that TMA loads: see peers.h
  std::pair<const void*, uint32_t> seen{};   // the count that was read last, and its value
  uint32_t same_answers = 0;                 // number of polls in a row that found nothing new
  std::pair<const void*, uint32_t> asked{};  // the count that was read last, since a barrier or the warp was waited for, and its value

  uint32_t lane() const { return thread % kLanes; }
  Warp& warp() const { return cta->warps[thread / kLanes]; }
  Warpgroup& warpgroup() const { return cta->warpgroups[thread / 128]; }
};

// An event at a later time, without a thread.
struct Event {
  uint64_t due, order;
  std::function<void()> run;
  bool operator<(const Event& other) const {  // std::priority_queue pops the greatest, so the earliest must be greatest
    return due != other.due ? due > other.due : order > other.order;
  }
};

struct Failure {
  std::string message;
};

struct Machine {
  Launch launch;
  Bias bias;
  uint64_t random = 1, now = 0, events_made = 0, steps = 0;
  uint32_t next_cta = 0;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  std::vector<uint64_t> stored;                                                   // stores so far, by place of a fiber
  std::map<std::pair<size_t, uint64_t>, std::shared_ptr<PeerStore>> on_the_way;  // by place and number
  std::unordered_map<uint64_t, std::pair<size_t, uint64_t>> own_stores;            // by word: place and number of its last store
  uint64_t acquired = 0;                                                          // times that a load acquired
  std::unordered_map<uint64_t, uint64_t> acquired_at;                             // by a peer's word: `acquired` when it was acquired
  std::map<const void*, Known> counted, counted_fenced;                           // at words of atomics that release
  std::map<const void*, WaitList> waiting_for_count;
  std::set<const Buffer*> mapped;                                                 // writable buffers of tensor maps
  uint32_t ready_polling = 0;
  bool waits_for_rank = false;  // a thread polls a word of another rank, which may need the next turn
  std::priority_queue<Event> events;
  bool is_ahead_over = false, is_end_of_ahead_due = false;  // about the previous kernel, if this launch depends on it
  WaitList waiting_for_ahead;
  std::map<const void*, uint32_t> maps_in_use;  // number of pieces of loads in flight that use each map
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<std::unique_ptr<Cta>> ctas;
  Context scheduler;
  Stats stats{};
  std::string error;
};

inline Machine* machine = nullptr;
inline Fiber* self = nullptr;  // null while the scheduler or an event runs

inline bool has_kernel_ahead() {
  const Launch& launch = machine->launch;
  return std::any_of(launch.buffers, launch.buffers + launch.num_buffers,
                     [](const Buffer& buffer) { return buffer.is_dependent != 0; });
}

}  // namespace sim
