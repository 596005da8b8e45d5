// Which fiber runs next, what happens meanwhile, and what is said when nothing can run any more.
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

// The kernel did what hardware punishes.
[[noreturn]] inline void fail(const std::string& what) { throw Failure{self ? name_of(*self) + ": " + what : what}; }

inline void to_scheduler() {
  Fiber* fiber = self;
  switch_context(fiber->context, machine->scheduler);
}

inline void make_ready(Fiber* fiber) {
  machine->ready.push_back(fiber);
  machine->ready_polling += fiber->is_polling;
}

// Somebody else may run here. Every operation that others could notice calls it.
inline void yield() {
  if (one_in(8)) {
    make_ready(self);
    to_scheduler();
  }
}

// For loops that ask again and again: lets the others run, and is known not to be progress.
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

inline std::string list_lanes(uint32_t mask) {
  if (mask == 0xffffffffu) return "";
  std::string lanes;
  for (uint32_t first = 0; first < kLanes; ++first) {
    if (!(mask >> first & 1)) continue;
    uint32_t last = first;
    while (last + 1 < kLanes && mask >> (last + 1) & 1) ++last;
    lanes += (lanes.empty() ? "" : ",") + text(first) + (last > first ? "-" + text(last) : "");
    first = last;
  }
  return (lanes.find_first_of(",-") == std::string::npos ? " lane " : " lanes ") + lanes;
}

// One line for each reason to wait, with the warps and lanes that have it.
inline std::string who_waits_for_what() {
  std::string report;
  for (const auto& cta : machine->ctas) {
    std::vector<std::pair<std::string, std::string>> lines;  // who, what
    for (uint32_t warp = 0; warp < cta->warps.size(); ++warp) {
      std::vector<std::pair<std::string, uint32_t>> reasons;
      for (const Fiber& fiber : machine->fibers) {
        if (fiber.cta != cta.get() || fiber.thread / kLanes != warp) continue;
        std::string reason = fiber.is_done ? "has exited" : fiber.wait.what ? fiber.wait.what : "runs";
        if (!fiber.is_done && fiber.wait.details) reason += " " + fiber.wait.details();
        auto known = reasons.begin();
        while (known != reasons.end() && known->first != reason) ++known;
        if (known == reasons.end()) known = reasons.insert(known, {reason, 0});
        known->second |= 1u << fiber.lane();
      }
      for (const auto& [reason, mask] : reasons) lines.push_back({"warp " + text(warp) + list_lanes(mask), reason});
    }
    for (size_t i = 0; i < lines.size(); ++i) {
      std::string who = lines[i].first;
      for (size_t j = i + 1; j < lines.size();)
        if (lines[j].second == lines[i].second) {
          who += ", " + lines[j].first.substr(5);
          lines.erase(lines.begin() + static_cast<long>(j));
        } else {
          ++j;
        }
      report += "\n  CTA " + text(cta->index) + " " + who + ": " + lines[i].second;
    }
  }
  return report;
}

inline void run_next_event() {
  Event event = machine->events.top();
  machine->events.pop();
  if (event.due > machine->now) machine->now = event.due;
  event.run();
}

inline Fiber* take_ready() {
  auto& ready = machine->ready;
  uint32_t i = random_below(static_cast<uint32_t>(ready.size()));
  for (int tries = 0; tries < 24 && ready[i]->is_slow; ++tries) i = random_below(static_cast<uint32_t>(ready.size()));
  Fiber* fiber = ready[i];
  ready[i] = ready.back();
  ready.pop_back();
  machine->ready_polling -= fiber->is_polling;
  return fiber;
}

// Runs until all fibers have ended. `on_exit` is told of each, and may start new ones in the place of the old.
inline void run_fibers(const std::function<void(Fiber*)>& on_exit, const std::function<bool()>& all_done) {
  uint64_t idle_polls = 0;
  while (!all_done()) {
    ++machine->now;
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
