// Operations of a whole warp, the barriers of a block, and the pool of registers.
#pragma once
#include "peers.h"
#include "shared_memory.h"

namespace sim {

// Waits until all 32 lanes reach the same operation; returns the value of each lane. If lanes wait at another operation
// or have exited, it fails at once; if lanes never arrive, the deadlock is reported.
inline const uint64_t* gather(const char* operation, uint64_t value) {
  Warp& warp = self->warp();
  if (warp.exited) fail(std::string(operation) + ": needs the whole warp, but some of its lanes have exited");
  if (warp.arrived == 0) {
    warp.operation = operation;
  } else if (std::strcmp(warp.operation, operation) != 0) {
    fail(std::string("divergent warp: this lane is at ") + operation + " while others of its warp are at " +
         warp.operation + "; both need the whole warp");
  }
  self->asked = {};
  const uint64_t generation = warp.generation;
  uint64_t* values = warp.values[generation & 1];
  values[self->lane()] = value;
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.generation;
    wake(warp.waiting);
  } else {
    while (warp.generation == generation)
      block(warp.waiting, {"waits for the rest of its warp at", [&warp] { return std::string(warp.operation); }});
  }
  return values;
}

inline void complete(NamedBarrier& barrier) {
  barrier.arrived = barrier.threads = 0;
  ++barrier.generation;
  wake(barrier.waiting);
}

// Records one thread's arrival. All arrivals of a generation must pass the same `threads`.
inline void arrive_at_named(const char* operation, uint32_t id, uint32_t threads) {
  const std::string what = std::string(operation) + ": barrier " + text(id);
  if (id >= kNamedBarriers) fail(what + " does not exist (0 to 15)");
  if (threads == 0 || threads % kLanes || threads > machine->launch.threads)
    fail(what + " for " + text(threads) + " threads; that is no multiple of 32, or more than the block has");
  NamedBarrier& barrier = self->cta->named[id];
  if (barrier.arrived && barrier.threads != threads)
    fail(what + " for " + text(threads) + " threads, but others arrived at it for " + text(barrier.threads));
  barrier.threads = threads;
  tell(barrier.known[barrier.generation % 2]);
  if (++barrier.arrived == threads) complete(barrier);
}

inline void wait_at_named(uint32_t id, uint64_t generation, const char* what) {
  NamedBarrier& barrier = self->cta->named[id];
  while (barrier.generation == generation)
    block(barrier.waiting, {what, [&barrier, id] {
                              return text(id) + ", where " + text(barrier.arrived) + " of " + text(barrier.threads) +
                                     " threads have arrived";
                            }});
  learn(barrier.known[generation % 2]);
}

// __syncthreads waits only for threads that have not exited, so an exit may complete the barrier.
inline void recheck_syncthreads(Cta* cta) {
  NamedBarrier& barrier = cta->named[0];
  if (barrier.arrived && barrier.arrived == cta->live_threads) complete(barrier);
}

inline void change_registers(uint32_t registers, bool increase, const char* what) {
  gather(what, registers);
  Cta* cta = self->cta;
  Warp& warp = self->warp();
  if (self->lane() == 0) {
    if (increase ? registers < warp.registers : registers > warp.registers)
      fail(std::string(what) + "<" + text(registers) + ">: the warp has " + text(warp.registers) +
           " registers a thread");
    if (increase) {
      const uint32_t needed = (registers - warp.registers) * kLanes;
      while (cta->free_registers < needed)
        block(cta->waiting_for_registers, {what, [cta, needed] {
                                             return "needs " + text(needed) + " registers for its warp; " +
                                                    text(cta->free_registers) + " of the block are free";
                                           }});
      cta->free_registers -= needed;
    } else {
      cta->free_registers += (warp.registers - registers) * kLanes;
      wake(cta->waiting_for_registers);
    }
    warp.registers = registers;
  }
  gather(what, registers);
}

void setmaxnreg_inc(uint32_t registers) { change_registers(registers, true, "setmaxnreg_inc"); }
void setmaxnreg_dec(uint32_t registers) { change_registers(registers, false, "setmaxnreg_dec"); }

}  // namespace sim

namespace ptx {

uint32_t thread_index() { return self->thread; }
uint32_t warp_index() { return shfl_sync(self->thread / kLanes, 0u); }
uint32_t lane_index() { return self->lane(); }
uint32_t block_index() { return self->cta->index; }
uint32_t grid_size() { return machine->launch.grid; }

bool elect_sync() {
  gather("elect_sync", 0);
  return self->warp().elected == self->lane();
}
uint32_t shfl_sync(uint32_t value, uint32_t source) {
  const uint64_t* values = gather("shfl_sync", value);
  return static_cast<uint32_t>(values[source % kLanes]);
}
float shfl_sync(float value, uint32_t source) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = shfl_sync(bits, source);
  std::memcpy(&value, &bits, 4);
  return value;
}
float shfl_xor_sync(float value, uint32_t bits) { return shfl_sync(value, lane_index() ^ bits); }
bool all_sync(bool value) {
  const uint64_t* values = gather("all_sync", value);
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    if (!values[lane]) return false;
  return true;
}
uint32_t ballot_sync(bool value) {
  const uint64_t* values = gather("ballot_sync", value);
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(values[lane]) << lane;
  return bits;
}
uint32_t reduce_min_sync(uint32_t value) {
  const uint64_t* values = gather("reduce_min_sync", value);
  return static_cast<uint32_t>(*std::min_element(values, values + kLanes));
}
uint32_t match_any_sync(uint32_t value) {
  const uint64_t* values = gather("match_any_sync", value);
  uint32_t bits = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) bits |= static_cast<uint32_t>(values[lane] == value) << lane;
  return bits;
}
uint32_t popc(uint32_t bits) { return static_cast<uint32_t>(__builtin_popcount(bits)); }
void syncwarp() {
  Warp& warp = self->warp();
  Known& known = warp.known[warp.generation & 1];
  tell(known);
  gather("syncwarp", 0);
  learn(known);
}

void syncthreads() { syncthreads_and(true); }
bool syncthreads_and(bool value) {
  yield();
  gather("syncthreads", 0);
  Cta* cta = self->cta;
  const uint64_t generation = cta->named[0].generation;
  bool& agreed = cta->agreed[generation % 2];
  agreed = value && (agreed || cta->named[0].arrived == 0);
  cta->named[0].threads = cta->live_threads;
  tell(cta->named[0].known[generation % 2]);
  ++cta->named[0].arrived;
  recheck_syncthreads(cta);
  wait_at_named(0, generation, "waits at syncthreads, barrier");
  yield();
  return agreed;
}
void bar_sync(uint32_t id, uint32_t threads) {
  yield();
  gather("bar_sync", id);
  const uint64_t generation = id < kNamedBarriers ? self->cta->named[id].generation : 0;
  arrive_at_named("bar_sync", id, threads);
  wait_at_named(id, generation, "waits in bar_sync at barrier");
  yield();
}
void bar_arrive(uint32_t id, uint32_t threads) {
  yield();
  gather("bar_arrive", id);
  arrive_at_named("bar_arrive", id, threads);
  yield();
}

void stmatrix_x4(void* row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t fragments[] = {a, b, c, d};
  yield();
  const uint64_t* rows = gather("stmatrix_x4", shared_offset(row, 16, 16, "stmatrix_x4"));
  for (uint32_t i = 0; i < 4; ++i)
    shared_store(static_cast<uint32_t>(rows[i * 8 + self->lane() / 4]) + self->lane() % 4 * 4, &fragments[i], 4);
  yield();
}

// The previous kernel ends soon, or only when nothing else can run.
void griddepcontrol_wait() {
  yield();
  if (sim::has_kernel_ahead() && !machine->is_ahead_over) {
    if (!machine->is_end_of_ahead_due)
      later(one_in(2) ? 100 : 1u << 30, [] {
        machine->is_ahead_over = true;
        wake(machine->waiting_for_ahead);
      });
    machine->is_end_of_ahead_due = true;
    block(machine->waiting_for_ahead, {"waits in griddepcontrol_wait for the kernel ahead", {}});
  }
  self->cta->dependency_resolved = true;
}
void griddepcontrol_launch_dependents() { yield(); }

}  // namespace ptx
