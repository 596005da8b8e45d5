// Decides which fiber runs next, runs events in between, and reports when nothing can continue.
#pragma once
#include "machine.h"

namespace ptx {
using namespace sim;
}

namespace sim {

inline uint32_t random_below(uint32_t n) {
  uint64_t& x = machine->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return static_cast<uint32_t>((x >> 16) % n);
}
inline bool one_in(uint32_t n) { return random_below(n) == 0; }

inline std::string text(uint64_t value) { return std::to_string(value); }

inline std::string name_of(const Fiber& fiber) {
  return "CTA " + text(fiber.cta->index) + ", warp " + text(fiber.thread / kLanes) + ", lane " + text(fiber.lane());
}

// Reports that the kernel broke a rule of the hardware.
[[noreturn]] inline void fail(const std::string& what) { throw Failure{self ? name_of(*self) + ": " + what : what}; }

inline void to_scheduler() {
  Fiber* fiber = self;
  switch_context(fiber->context, machine->scheduler);
}

inline void make_ready(Fiber* fiber) {
  machine->ready.push_back(fiber);
  machine->ready_polling += fiber->is_polling;
}

// Lets other threads run. Every operation that other threads could notice calls it.
inline void yield() {
  if (one_in(8)) {
    make_ready(self);
    to_scheduler();
  }
}

// For polling loops: lets other threads run, and does not count as progress.
inline void poll(Wait wait) {
  self->wait = std::move(wait);
  self->is_polling = true;
  make_ready(self);
  to_scheduler();
  self->is_polling = false;
  self->wait = {};
}

inline void block(WaitList& list, const Wait& wait) {
  self->wait = wait;
  list.push_back(self);
  to_scheduler();
  self->wait = {};
}

inline void wake(WaitList& list) {
  for (Fiber* fiber : list) make_ready(fiber);
  list.clear();
}

inline void later(uint32_t delay, std::function<void()> run) {
  machine->events.push({machine->now + random_below(delay) + 1, machine->events_made++, std::move(run)});
}

// Writes the bits of a mask as a list after a word: "warps 0-7,11", "lane 3".
inline std::string list_bits(const char* word, uint32_t mask) {
  std::string list;
  for (uint32_t first = 0; first < 32; ++first) {
    if (!(mask >> first & 1)) continue;
    uint32_t last = first;
    while (last < 31 && mask >> (last + 1) & 1) ++last;
    list += (list.empty() ? "" : ",") + text(first) + (last > first ? "-" + text(last) : "");
    first = last;
  }
  return std::string(word) + (mask & (mask - 1) ? "s " : " ") + list;
}

inline std::string state_of(const Fiber& fiber) {
  if (fiber.is_done) return "exited";
  if (!fiber.wait.what) return "can run";
  return fiber.wait.what + (fiber.wait.details ? " " + fiber.wait.details() : "");
}

// Writes one line for each state and set of lanes, with all warps that have exactly these lanes in that state.
inline std::string who_waits_for_what() {
  std::string report;
  for (const auto& cta : machine->ctas) {
    if (cta->live_threads == 0) continue;
    std::map<std::pair<std::string, uint32_t>, uint32_t> lanes;  // (state, warp) -> mask of lanes
    for (const Fiber& fiber : machine->fibers)
      if (fiber.cta == cta.get()) lanes[{state_of(fiber), fiber.thread / kLanes}] |= 1u << fiber.lane();
    std::map<std::pair<std::string, uint32_t>, uint32_t> warps;  // (state, mask of lanes) -> mask of warps
    for (const auto& [key, mask] : lanes) warps[{key.first, mask}] |= 1u << key.second;
    for (const auto& [key, mask] : warps)
      report += "\n  CTA " + text(cta->index) + ", " + list_bits("warp", mask) +
                (key.second == 0xffffffffu ? "" : ", " + list_bits("lane", key.second)) + ": " + key.first;
  }
  return report;
}

inline void run_next_event() {
  Event event = machine->events.top();
  machine->events.pop();
  if (event.due > machine->now) machine->now = event.due;
  event.run();
}

// A thread that polls in vain must not keep a slow thread from its turns.
inline bool may_wait(const Fiber& fiber) { return fiber.is_slow || fiber.same_answers > 100; }

inline Fiber* take_ready() {
  auto& ready = machine->ready;
  uint32_t i = random_below(static_cast<uint32_t>(ready.size()));
  for (int tries = 0; tries < 24 && may_wait(*ready[i]); ++tries) i = random_below(static_cast<uint32_t>(ready.size()));
  Fiber* fiber = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  machine->ready_polling -= fiber->is_polling;
  return fiber;
}

// Runs until all fibers have ended. It calls `on_exit` for each ended fiber; the function may start new ones in its place.
inline void run_fibers(const std::function<void(Fiber*)>& on_exit, const std::function<bool()>& all_done) {
  uint64_t idle_polls = 0;
  while (!all_done()) {
    ++machine->now;
    if (machine->launch.other_ranks && (machine->now % 64 == 0 || machine->waits_for_rank)) {
      machine->waits_for_rank = false;
      if (machine->launch.other_ranks()) throw Failure{"another rank failed"};
    }
    const bool only_polling = machine->ready.size() == machine->ready_polling;
    if (!machine->events.empty() && (only_polling || machine->events.top().due <= machine->now)) run_next_event();
    if (machine->ready.empty()) {
      if (machine->events.empty()) throw Failure{"deadlock: every thread waits." + who_waits_for_what()};
      continue;
    }
    idle_polls = only_polling ? idle_polls + 1 : 0;
    if (idle_polls > 1000 + 64 * machine->ready.size() && machine->events.empty())
      throw Failure{"deadlock: every thread waits, some by asking again and again." + who_waits_for_what()};
    if (++machine->steps > machine->launch.max_steps)
      throw Failure{"no end after " + text(machine->steps) + " steps of the schedule." + who_waits_for_what()};
    self = take_ready();
    Fiber* fiber = self;
    switch_context(machine->scheduler, fiber->context);
    self = nullptr;
    if (!machine->error.empty()) throw Failure{machine->error};
    if (fiber->is_done) on_exit(fiber);
  }
  while (!machine->events.empty()) run_next_event();
}

}  // namespace sim
