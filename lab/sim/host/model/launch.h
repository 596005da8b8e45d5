// A launch. As on a GPU with `num_sms` SMs, a new cluster starts when another one ends.
#pragma once
#include "cp_async.h"
#include "mma.h"
#include "tma.h"
#include "wgmma.h"

// Generated with the kernel: calls it with arguments from an array of pointers.
extern "C" void sim_call_kernel(void** arguments);
extern "C" size_t sim_argument_bytes(size_t index);

namespace sim {

struct Bounds {
  uint32_t threads, min_blocks;
};
inline std::vector<Bounds>& all_bounds() {
  static std::vector<Bounds> bounds;
  return bounds;
}
LaunchBounds::LaunchBounds(uint32_t threads, uint32_t min_blocks) { all_bounds().push_back({threads, min_blocks}); }

// In the order of SCHEDULES in lab/sim/library.py.
enum Schedule {
  kEven,
  kSlowCta,
  kSlowWarps,
  kSlowProducer,
  kSlowMath,
  kSlowWarpgroup,
  kSlowLanes,
  kLateLoads,
  kPromptLoads,
  kLateStores,
  kNumSchedules
};

struct Places {
  uint8_t* shared_memory;
  const Stacks* stacks;
  uint32_t slow_cta, slow_warpgroup;
  Schedule schedule;
};
inline Places places;

constexpr size_t kViewBytes = 256 << 10;

inline void check_end_of_thread() {
  Warp& warp = self->warp();
  ++warp.exited;
  if (warp.arrived) fail(std::string("exits while other lanes of its warp wait for it at ") + warp.operation);
  if (!warp.in_flight.empty()) fail("exits with a WGMMA in flight: wgmma_wait_group<0> is missing");
  if (!self->uncommitted.empty()) fail("exits with TMA stores that were never committed");
  if (!self->copies.empty()) fail("exits with copies to shared memory that it never waited for");
}

inline void check_end_of_cta(Cta* cta) {
  const std::string name = "CTA " + text(cta->index) + " exits ";
  if (cta->loads_in_flight)
    throw Failure{name + "with " + text(cta->loads_in_flight) +
                  " pieces of TMA loads in flight into its shared memory"};
  for (const Fiber& fiber : machine->fibers)
    if (fiber.cta == cta)
      for (const auto& group : fiber.store_groups)
        if (group->unread)
          throw Failure{name + "while TMA still reads its shared memory for a store of warp " +
                        text(fiber.thread / kLanes) + ": tma_store_wait_read<0> is missing"};
  for (const auto& barrier : cta->mbarriers)
    if (barrier->bytes)
      throw Failure{name + "with bytes that do not add up: " + describe(*barrier)};
  for (uint32_t i = 0; i < cta->warps.size(); ++i)
    if (cta->warps[i].registers != cta->warps[i / 4 * 4].registers)
      throw Failure{name + "with different setmaxnreg in the warps of one warpgroup (" + text(i / 4) +
                    "): all four must execute it"};
}

inline void end_thread() {
  check_end_of_thread();
  Cta* cta = self->cta;
  Cluster* cluster = cta->cluster;
  if (self->has_arrived && self->arrived_generation == cluster->generation) --cluster->arrived;
  --cluster->live_threads;
  --cta->live_threads;
  if (cta->live_threads == 0) check_end_of_cta(cta);
  recheck_syncthreads(cta);
  recheck_cluster_barrier(cluster);
}

inline void run_thread() {
  try {
    sim_call_kernel(machine->launch.arguments);
    end_thread();
  } catch (const Failure& failure) {
    machine->error = failure.message;
  }
  self->is_done = true;
  for (;;) to_scheduler();
}

inline bool is_slow(const Fiber& fiber) {
  const uint32_t warpgroup = fiber.thread / 128, last = (machine->launch.threads - 1) / 128;
  switch (places.schedule) {
    case kSlowCta: return fiber.cta->index % machine->launch.num_sms == places.slow_cta;
    case kSlowProducer: return warpgroup == last;
    case kSlowMath: return warpgroup != last;
    case kSlowWarpgroup: return warpgroup == places.slow_warpgroup;
    case kSlowLanes: return one_in(16);
    default: return false;
  }
}

inline void start_cluster(size_t place) {
  const Launch& launch = machine->launch;
  auto cluster = std::make_unique<Cluster>();
  cluster->live_threads = launch.threads * launch.cluster_size;
  for (uint32_t rank = 0; rank < launch.cluster_size; ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->index = machine->next_cta++;
    cta->rank = rank;
    cta->cluster = cluster.get();
    const size_t slot = place * launch.cluster_size + rank;
    cta->generic = places.shared_memory + slot * 2 * kViewBytes;
    cta->async = cta->generic + kViewBytes;
    poison(cta.get(), {0, launch.shared_bytes});
    cta->live_threads = launch.threads;
    cta->warps.resize(launch.threads / kLanes);
    cta->warpgroups.resize((launch.threads + 127) / 128);
    const Bounds& bounds = all_bounds().back();
    for (Warp& warp : cta->warps) {
      warp.elected = random_below(kLanes);
      // The most registers that the compiler may give each thread. setmaxnreg moves these registers between warps.
      warp.registers = std::min(kRegistersPerSm / (bounds.threads * bounds.min_blocks) / 8 * 8, 248u);
    }
    for (uint32_t thread = 0; thread < launch.threads; ++thread) {
      const size_t index = slot * launch.threads + thread;
      Fiber& fiber = machine->fibers[index];
      fiber = Fiber{};
      fiber.cta = cta.get();
      fiber.thread = thread;
      const bool is_slow_warp = places.schedule == kSlowWarps && thread % kLanes == 0 && one_in(3);
      fiber.is_slow = is_slow(fiber) || is_slow_warp ||
                      (places.schedule == kSlowWarps && thread % kLanes && machine->fibers[index - 1].is_slow);
      prepare_context(fiber.context, (*places.stacks)[index], kStackBytes, run_thread);
      make_ready(&fiber);
    }
    cluster->ctas.push_back(cta.get());
    machine->ctas.push_back(std::move(cta));
  }
  machine->clusters.push_back(std::move(cluster));
}

inline void choose_bias() {
  const Launch& launch = machine->launch;
  for (int i = 0; i < 8; ++i) random_below(2);  // because small seeds begin with similar numbers
  const uint32_t drawn = random_below(kNumSchedules);
  places.schedule = static_cast<Schedule>(launch.schedule >= 0 ? launch.schedule : static_cast<int>(drawn));
  places.slow_cta = random_below(launch.num_sms);
  places.slow_warpgroup = random_below((launch.threads + 127) / 128);
  constexpr uint32_t kLoadDelays[] = {100, 1000, 10000}, kStoreDelays[] = {100, 3000, 1u << 30};
  Bias& bias = machine->bias;
  bias.early_products = one_in(2);
  bias.whole_warpgroup = one_in(2);
  bias.late_answers = one_in(3);
  bias.load_delay = kLoadDelays[random_below(3)];
  bias.store_delay = kStoreDelays[random_below(3)];
  if (places.schedule == kLateLoads) bias.load_delay = 30000;
  if (places.schedule == kPromptLoads) bias.load_delay = 4;
  if (places.schedule == kLateStores) bias.store_delay = 1u << 30;
}

// Finds the writable buffers that belong to tensor maps among the arguments.
inline void note_mapped() {
  for (size_t i = 0; const size_t bytes = sim_argument_bytes(i); ++i) {
    const auto* argument = static_cast<const uint8_t*>(machine->launch.arguments[i]);
    for (size_t at = 0; at + sizeof(ptx::TensorMap) <= bytes; at += alignof(ptx::TensorMap)) {
      ptx::TensorMap map;
      std::memcpy(&map, argument + at, sizeof map);
      const Buffer* buffer = map.magic == ptx::TensorMap::kMagic ? find_buffer(map.tensor, 1) : nullptr;
      if (buffer && buffer->is_writable) machine->mapped.insert(buffer);
    }
  }
}

inline void check_launch(const Launch& launch) {
  const auto refuse = [](const std::string& what) { throw Failure{"launch: " + what}; };
  if (launch.threads == 0 || launch.threads % kLanes || launch.threads > 1024)
    refuse(text(launch.threads) + " threads in a block; it takes a multiple of 32 up to 1024");
  if (launch.cluster_size == 0 || launch.cluster_size > 16) refuse("clusters of 1 to 16 CTAs");
  if (launch.grid == 0 || launch.grid % launch.cluster_size) refuse("a grid of whole clusters");
  if (launch.shared_bytes > kSharedLimit) refuse("more than 232448 bytes of shared memory");
  if (all_bounds().empty()) refuse("the source has no KERNEL(...)");
  if (launch.threads > all_bounds().back().threads)
    refuse(text(launch.threads) + " threads in a block of a kernel bounded to " + text(all_bounds().back().threads));
}

inline void run(const Launch& launch) {
  machine->launch = launch;
  machine->random = launch.seed * 0x9e3779b97f4a7c15ull + 1;
  check_launch(launch);
  note_mapped();
  choose_bias();
  const size_t clusters = launch.grid / launch.cluster_size;
  const size_t resident = std::min<size_t>(clusters, std::max(1u, launch.num_sms / launch.cluster_size));
  const size_t slots = resident * launch.cluster_size;
  const Stacks stacks(slots * launch.threads);
  places.stacks = &stacks;
  std::vector<uint8_t> memory(slots * 2 * kViewBytes + 1024);
  places.shared_memory = memory.data() + (1024 - reinterpret_cast<uintptr_t>(memory.data()) % 1024);
  machine->fibers.resize(slots * launch.threads);
  machine->stored.resize(slots * launch.threads);
  for (size_t place = 0; place < resident; ++place) start_cluster(place);
  size_t left = clusters;
  const auto on_exit = [&](const Fiber* fiber) {
    if (fiber->cta->cluster->live_threads) return;
    --left;
    const size_t place = static_cast<size_t>(fiber - machine->fibers.data()) / launch.threads / launch.cluster_size;
    if (machine->next_cta < launch.grid) start_cluster(place);
  };
  run_fibers(on_exit, [&] { return left == 0; });
  if (has_kernel_ahead() && !machine->is_ahead_over)
    throw Failure{"no block waits in griddepcontrol_wait: a kernel that waits for this one may read what the kernel ahead writes"};
}

}  // namespace sim

// Returns null on success, else an error message.
extern "C" __attribute__((visibility("default"))) const char* sim_run(const sim::Launch* launch, sim::Stats* stats) {
  static std::string message;
  message.clear();
  sim::machine = new sim::Machine;
  try {
    sim::run(*launch);
  } catch (const sim::Failure& failure) {
    message = failure.message;
  }
  *stats = sim::machine->stats;
  stats->steps = sim::machine->steps;
  delete sim::machine;
  sim::machine = nullptr;
  sim::self = nullptr;
  return message.empty() ? nullptr : message.c_str();
}
