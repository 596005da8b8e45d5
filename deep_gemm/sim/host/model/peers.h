// Memory of other ranks. A store there lands late, and out of order; by what barriers and counts order, a thread knows of other
// threads' stores, and a release lands behind all stores that its thread knows of. What has landed is news, which no
// ordinary load of its rank may read before a load with acquire has read a flag that was released by the same peer.
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

inline void acquire(const Buffer& buffer, uint64_t address) {
  const uint8_t* news = news_at(buffer, address);
  if (!news || !(*news & kReleased)) return;
  const uint8_t from = *news & static_cast<uint8_t>(~kReleased);
  for (uint32_t i = 0; i < machine->launch.num_buffers; ++i) {
    const Buffer& own = machine->launch.buffers[i];
    if (is_of_peer(own) || !own.news) continue;
    for (uint64_t word = 0; word < (own.bytes + 3) / 4; ++word)
      if ((own.news[word] & ~kReleased) == from) own.news[word] = 0;
  }
}

// What a thread knows of itself: all that it has stored so far.
inline const Known& known_of(Fiber& fiber) {
  const size_t place = static_cast<size_t>(&fiber - machine->fibers.data());
  if (fiber.known.size() <= place) fiber.known.resize(place + 1);
  fiber.known[place] = machine->stored[place];
  return fiber.known;
}

// What this thread knows becomes known to those who learn from there.
inline void tell(Known& known) {
  if (machine->launch.other_ranks) join(known, known_of(*self));
}
inline void learn(const Known& known) {
  if (machine->launch.other_ranks) join(self->known, known);
}

inline void store_to_peer(const Buffer& buffer, uint64_t address, const void* bytes, uint32_t size, bool is_release) {
  ++machine->stats.to_peers;
  auto store = std::make_shared<PeerStore>();
  store->address = address, store->size = size, store->news = news_at(buffer, address);
  std::memcpy(store->bytes, bytes, size);
  if (is_release) {
    later(300, [store, known = known_of(*self)] {
      for (auto& [of, earlier] : machine->on_the_way)
        if (of.first < known.size() && of.second < known[of.first]) land(*earlier);
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
