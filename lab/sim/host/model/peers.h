// Memory of other ranks. Stores to it arrive late, and out of order. Through barriers and counts a thread learns of other
// threads' stores, and a release arrives after all stores that its thread knows of. Arrived bytes are news: an ordinary
// load of the owner may read them only after a load with acquire has read a flag that the same peer released.
//
// In the other direction, a peer may read a store of this rank to its own memory if a thread that knew of the store has
// released a flag there, and the peer has acquired the flag.
//
// TMA loads poison for words that ordinary stores of the same kernel have written, unless a thread that knew of the stores
// fenced and then released, and the loading thread acquired and then fenced.
#pragma once
#include "scheduler.h"

namespace sim {

inline void join(Known& into, const Known& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

inline bool is_of_peer(const Buffer& buffer) { return buffer.rank != machine->launch.rank; }

constexpr uint8_t kReleased = 0x80;

inline uint8_t* news_at(const Buffer& buffer, uint64_t address) {
  return buffer.news ? buffer.news + (address - buffer.base) / 4 : nullptr;
}

inline void land(PeerStore& store, uint8_t kind = 0) {
  if (store.has_landed) return;
  store.has_landed = true;
  std::memcpy(reinterpret_cast<void*>(store.address), store.bytes, store.size);
  if (uint8_t* news = store.news)
    std::memset(news, static_cast<uint8_t>(machine->launch.rank + 1) | kind, (store.size + 3) / 4);
}

inline void check_no_news(const Buffer& buffer, uint64_t address, uint32_t size, const char* what) {
  const uint8_t* news = news_at(buffer, address);
  for (uint32_t i = 0; news && i < (size + 3) / 4; ++i)
    if (news[i])
      fail(std::string(what) + " reads byte " + text(address - buffer.base) + " of `" + buffer.name + "`, which rank " +
           text((news[i] & ~kReleased) - 1) + " has written: no acquire of a flag of that rank lies in between");
}

inline uint8_t bit_of(uint32_t rank) { return static_cast<uint8_t>(1u << rank); }

inline void check_not_held(const Buffer& buffer, uint64_t address, uint32_t size, const char* what) {
  if (!is_of_peer(buffer) || !buffer.held) return;
  const uint8_t* held = buffer.held + (address - buffer.base) / 4;
  for (uint32_t i = 0; i < (size + 3) / 4; ++i)
    if (held[i] & bit_of(machine->launch.rank))
      fail(std::string(what) + " reads byte " + text(address - buffer.base) + " of `" + buffer.name + "`, which rank " +
           text(buffer.rank) + " has written: it has released no flag behind that which this rank has acquired");
}

// Tells whether TMA may read a word as its rank wrote it: the word was released and acquired, and this thread ran a fence later,
// because TMA reads through another proxy. A box may contain words that no thread uses, so a load of other words is no mistake.
inline bool is_known_to_tma(const Buffer& buffer, uint64_t address) {
  if (!is_of_peer(buffer) || !buffer.held) return true;
  if (buffer.held[(address - buffer.base) / 4] & bit_of(machine->launch.rank)) return false;
  const auto acquired = machine->acquired_at.find(address / 4);
  return acquired == machine->acquired_at.end() || self->fenced_at >= acquired->second;
}

// Records a store of this rank to its own memory.
inline void hold(const Buffer& buffer, uint64_t address, uint32_t size, size_t place) {
  const bool is_for_peers = machine->launch.other_ranks && buffer.held;
  if (!is_for_peers && !machine->mapped.count(&buffer)) return;
  const uint64_t word = (address - buffer.base) / 4, words = (size + 3) / 4;
  if (is_for_peers) {
    std::memset(buffer.held + word, 0xff, words);
    std::memset(buffer.released + word, 0, words);
  }
  for (uint64_t i = 0; i < words; ++i) machine->own_stores[address / 4 + i] = {place, machine->stored[place]};
  ++machine->stored[place];
}

// Releases to a rank all stores that a thread knows of, and all stores of earlier kernels.
inline void release_own(const Known& known, uint32_t to) {
  for (uint32_t i = 0; i < machine->launch.num_buffers; ++i) {
    const Buffer& own = machine->launch.buffers[i];
    if (is_of_peer(own) || !own.held) continue;
    for (uint64_t word = 0; word < (own.bytes + 3) / 4; ++word) {
      if (!(own.held[word] & bit_of(to))) continue;
      const auto store = machine->own_stores.find(own.base / 4 + word);
      const bool is_known = store == machine->own_stores.end() ||
                            (store->second.first < known.size() && store->second.second < known[store->second.first]);
      if (is_known) own.released[word] |= bit_of(to);
    }
  }
}

inline void acquire(const Buffer& buffer, uint64_t address) {
  const uint8_t* news = news_at(buffer, address);
  if (!news || !(*news & kReleased)) return;
  const uint8_t from = *news & static_cast<uint8_t>(~kReleased);
  ++machine->acquired;
  for (uint32_t i = 0; i < machine->launch.num_buffers; ++i) {
    const Buffer& each = machine->launch.buffers[i];
    if (!each.news || (is_of_peer(each) && each.rank + 1 != from)) continue;
    for (uint64_t word = 0; word < (each.bytes + 3) / 4; ++word) {
      if (!is_of_peer(each)) {
        if ((each.news[word] & ~kReleased) == from) each.news[word] = 0;
      } else if (each.released[word] & each.held[word] & bit_of(machine->launch.rank)) {
        each.held[word] &= static_cast<uint8_t>(~bit_of(machine->launch.rank));
        machine->acquired_at[each.base / 4 + word] = machine->acquired;
      }
    }
  }
}

// Returns a thread's knowledge, including all its own stores so far.
inline const Known& known_of(Fiber& fiber) {
  const size_t place = static_cast<size_t>(&fiber - machine->fibers.data());
  if (fiber.known.size() <= place) fiber.known.resize(place + 1);
  fiber.known[place] = machine->stored[place];
  return fiber.known;
}

// Adds this thread's knowledge to `known`; other threads learn from there.
inline bool is_tracking() { return machine->launch.other_ranks || !machine->mapped.empty(); }
inline void tell(Known& known) {
  if (is_tracking()) join(known, known_of(*self));
}
inline void learn(const Known& known) {
  if (is_tracking()) join(self->known, known);
}

inline bool is_shown_to_tma(uint64_t address) {
  const auto store = machine->own_stores.find(address / 4);
  if (store == machine->own_stores.end()) return true;
  const auto [place, number] = store->second;
  return place < self->for_tma.size() && number < self->for_tma[place];
}

inline void store_to_peer(const Buffer& buffer, uint64_t address, const void* bytes, uint32_t size, bool is_release) {
  ++machine->stats.to_peers;
  auto store = std::make_shared<PeerStore>();
  store->address = address, store->size = size, store->news = news_at(buffer, address);
  std::memcpy(store->bytes, bytes, size);
  if (is_release) {
    later(300, [store, known = known_of(*self), to = buffer.rank] {
      for (auto& [of, earlier] : machine->on_the_way)
        if (of.first < known.size() && of.second < known[of.first]) land(*earlier);
      release_own(known, to);
      land(*store, kReleased);
    });
    return;
  }
  const size_t place = static_cast<size_t>(self - machine->fibers.data());
  const std::pair<size_t, uint64_t> number{place, machine->stored[place]++};
  machine->on_the_way[number] = store;
  later(one_in(8) ? 1u << 30 : machine->bias.store_delay, [store, number] {
    land(*store);
    machine->on_the_way.erase(number);
  });
}

}  // namespace sim
