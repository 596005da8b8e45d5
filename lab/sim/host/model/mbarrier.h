// mbarriers. The 8 bytes in shared memory hold a mark and an index, so that the next use of a barrier detects that its
// bytes were overwritten.
#pragma once
#include "cluster.h"

namespace sim {

constexpr uint32_t kMbarrierMark = 0x6d626172;
constexpr uint32_t kMbarrierMaximum = (1 << 20) - 1;  // for arrivals, and for bytes (PTX ISA, "tx-count")

inline std::string at(uint32_t offset) { return "the mbarrier at shared-memory offset " + text(offset); }

inline Mbarrier& mbarrier_at(Cta* cta, uint32_t offset, const char* what) {
  uint32_t words[2];
  std::memcpy(words, cta->generic + offset, 8);
  if (words[0] != kMbarrierMark || words[1] >= cta->mbarriers.size() || cta->mbarriers[words[1]]->offset != offset)
    fail(std::string(what) + ": " + at(offset) + " of CTA " + text(cta->index) +
         " is not initialized, or something has overwritten it");
  return *cta->mbarriers[words[1]];
}

inline Mbarrier& mbarrier_of(uint64_t* barrier, const char* what) {
  return mbarrier_at(self->cta, shared_offset(barrier, 8, 8, what), what);
}

inline void advance_if_complete(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  wake(barrier.waiting);
}

inline void check_bytes(const Mbarrier& barrier, const char* what) {
  if (barrier.bytes > kMbarrierMaximum || barrier.bytes < -static_cast<int64_t>(kMbarrierMaximum))
    fail(std::string(what) + ": tx-count overflow: " + at(barrier.offset) + " would count " +
         std::to_string(barrier.bytes) + " bytes, beyond 2^20 - 1");
}

inline void arrive(Mbarrier& barrier, const char* what) {
  if (barrier.pending == 0)
    fail(std::string(what) + ": more arrivals than " + at(barrier.offset) + " was initialized for (" +
         text(barrier.expected) + "), while " + std::to_string(barrier.bytes) + " bytes are still to land");
  tell(barrier.known);
  --barrier.pending;
  advance_if_complete(barrier);
}

inline std::string describe(const Mbarrier& barrier) {
  const std::string bytes = barrier.bytes < 0
                                ? ", and " + std::to_string(-barrier.bytes) + " bytes too many have landed"
                                : " and " + std::to_string(barrier.bytes) + " bytes";
  return at(barrier.offset) + ", whose phase " + text(barrier.phase) + " (parity " + text(barrier.phase & 1) +
         ") lacks " + text(barrier.pending) + " of " + text(barrier.expected) + " arrivals" + bytes;
}

inline std::string describe(const Mbarrier& barrier, uint32_t parity) {
  return "parity " + text(parity) + " of " + describe(barrier);
}

inline bool is_over(const Mbarrier& barrier, uint32_t parity) { return (barrier.phase & 1) != parity; }

// Lets a thread that has seen a phase end read the data that arrived in it.
inline void show_landed(Cta* cta, Mbarrier& barrier) {
  learn(barrier.known);
  auto& landed = barrier.landed;
  for (size_t i = 0; i < landed.size();) {
    if (landed[i].first >= barrier.phase) {
      ++i;
      continue;
    }
    const Range range = landed[i].second;
    std::memcpy(cta->generic + range.offset, cta->async + range.offset, range.bytes);
    landed[i] = landed.back();
    landed.pop_back();
  }
  auto& sent = barrier.sent;
  for (size_t i = 0; i < sent.size();) {
    Sent& each = sent[i];
    if (each.phase + 1 < barrier.phase) {
      each = sent.back();
      sent.pop_back();
      continue;
    }
    ++i;
    if (each.phase >= barrier.phase) continue;
    if (!each.is_shown) std::memcpy(cta->generic + each.range.offset, each.bytes, each.range.bytes);
    each.is_shown = true;
    self->unfenced.push_back(each.range);
  }
}

inline bool ask(uint64_t* pointer, uint32_t parity, const char* what) {
  if (parity > 1) fail(std::string(what) + ": parity " + text(parity) + "; it is 0 or 1");
  Mbarrier& barrier = mbarrier_of(pointer, what);
  poll({"asks for the end of", [&barrier, parity] { return describe(barrier, parity); }});
  // A barrier may answer late, but not in every run: a vote of 32 lanes that may each miss the answer rarely passes.
  ++self->same_answers;
  if (!is_over(barrier, parity) || (machine->bias.late_answers && one_in(4))) return false;
  self->same_answers = 0;
  show_landed(self->cta, barrier);
  return true;
}

}  // namespace sim

namespace ptx {

void mbarrier_init(uint64_t* pointer, uint32_t arrivals) {
  Cta* cta = self->cta;
  const uint32_t offset = shared_offset(pointer, 8, 8, "mbarrier_init");
  if (arrivals == 0 || arrivals > kMbarrierMaximum)
    fail("mbarrier_init: " + text(arrivals) + " arrivals; it takes 1 to 2^20 - 1");
  const uint32_t words[2] = {kMbarrierMark, static_cast<uint32_t>(cta->mbarriers.size())};
  std::memcpy(cta->generic + offset, words, 8);
  cta->mbarriers.push_back(std::make_unique<Mbarrier>());
  Mbarrier* barrier = cta->mbarriers.back().get();
  barrier->offset = offset;
  barrier->expected = barrier->pending = arrivals;
  self->unfenced_barriers.push_back(barrier);
  yield();
}

void fence_mbarrier_init() {
  for (Mbarrier* barrier : self->unfenced_barriers) barrier->is_fenced = true;
  self->unfenced_barriers.clear();
  yield();
}

void mbarrier_arrive(uint64_t* pointer) {
  yield();
  arrive(mbarrier_of(pointer, "mbarrier_arrive"), "mbarrier_arrive");
  yield();
}

void mbarrier_arrive_expect_tx(uint64_t* pointer, uint32_t bytes) {
  yield();
  Mbarrier& barrier = mbarrier_of(pointer, "mbarrier_arrive_expect_tx");
  barrier.bytes += bytes;
  check_bytes(barrier, "mbarrier_arrive_expect_tx");
  arrive(barrier, "mbarrier_arrive_expect_tx");
  yield();
}

void mbarrier_arrive_cluster(uint64_t* pointer, uint32_t rank) {
  yield();
  Cta* cta = peer(rank, "mbarrier_arrive_cluster");
  const uint32_t offset = shared_offset(pointer, 8, 8, "mbarrier_arrive_cluster");
  Mbarrier& barrier = mbarrier_at(cta, offset, "mbarrier_arrive_cluster");
  if (!barrier.is_fenced)
    fail("mbarrier_arrive_cluster: " + at(offset) + " of CTA " + text(cta->index) +
         " is not visible to the cluster: fence_mbarrier_init is missing");
  arrive(barrier, "mbarrier_arrive_cluster");
  yield();
}

void mbarrier_wait_parity(uint64_t* pointer, uint32_t parity) {
  yield();
  if (parity > 1) fail("mbarrier_wait_parity: parity " + text(parity) + "; it is 0 or 1");
  Mbarrier& barrier = mbarrier_of(pointer, "mbarrier_wait_parity");
  while (!is_over(barrier, parity))
    block(barrier.waiting, {"waits for the end of", [&barrier, parity] { return describe(barrier, parity); }});
  show_landed(self->cta, barrier);
  self->asked = {};
  yield();
}

void mbarrier_wait_parity_cluster(uint64_t* pointer, uint32_t parity) { mbarrier_wait_parity(pointer, parity); }

bool mbarrier_test_wait_parity(uint64_t* pointer, uint32_t parity) {
  return ask(pointer, parity, "mbarrier_test_wait_parity");
}
bool mbarrier_try_wait_parity(uint64_t* pointer, uint32_t parity) {
  return ask(pointer, parity, "mbarrier_try_wait_parity");
}
bool mbarrier_try_wait_parity_cluster(uint64_t* pointer, uint32_t parity) { return mbarrier_try_wait_parity(pointer, parity); }

}  // namespace ptx
