// TMA. A load poisons its box when it is issued, and arrives in pieces, each with a separate delay. A store reads shared
// memory late (at the latest when its thread waits for the read) and writes global memory even later.
#pragma once
#include "global_memory.h"
#include "mbarrier.h"
#include "tensormap.h"

namespace sim {

struct Box {
  TensorMap map;
  int64_t corner[5];
  uint32_t offset;  // in shared memory
  uint32_t row_bytes, rows;
};

// Makes a box without a place in shared memory.
inline Box make_box(const TensorMap* map, std::initializer_list<int32_t> corner, const char* what) {
  check_use_of_map(map, what);
  if (map->rank != corner.size())
    fail(std::string(what) + ": the tensor map has " + text(map->rank) + " dimensions");
  Box box{*map, {}, 0, map->box[0] * uint32_t{map->element_bytes}, 1};
  std::copy(corner.begin(), corner.end(), box.corner);
  for (uint32_t i = 1; i < map->rank; ++i) box.rows *= map->box[i];
  // An H200 reports this mistake as an illegal instruction.
  if (box.corner[0] * int64_t{map->element_bytes} % 16)
    fail(std::string(what) + ": the box begins at element " + std::to_string(box.corner[0]) +
         " of a row, which is no multiple of 16 bytes");
  return box;
}

inline Box make_box(const TensorMap* map, const void* shared, std::initializer_list<int32_t> corner, const char* what) {
  Box box = make_box(map, corner, what);
  box.offset = shared_offset(shared, box.row_bytes * box.rows, 128, what);
  return box;
}

// Calls visit(shared address of the chunk, first byte inside the tensor, end of such bytes, global address) for
// the 16-byte chunks of some rows. Addresses wrap at 2^64, as on the hardware; bounds are checked by dimension.
template <typename Visit>
void visit_chunks(const Box& box, uint32_t first_row, uint32_t end_row, const Visit& visit) {
  const TensorMap& map = box.map;
  const int64_t width = map.element_bytes;
  const int64_t inside_from = std::max<int64_t>(0, -box.corner[0]) * width;
  const int64_t inside_to = std::min<int64_t>(map.box[0], static_cast<int64_t>(map.dims[0]) - box.corner[0]) * width;
  for (uint32_t row = first_row; row < end_row; ++row) {
    uint64_t address = map.base + static_cast<uint64_t>(box.corner[0] * width);
    bool is_inside = true;
    uint32_t rest = row;
    for (uint32_t i = 1; i < map.rank; ++i) {
      const int64_t index = box.corner[i] + rest % map.box[i];
      rest /= map.box[i];
      is_inside = is_inside && index >= 0 && index < static_cast<int64_t>(map.dims[i]);
      address += static_cast<uint64_t>(index) * map.strides[i - 1];
    }
    for (int64_t byte = 0; byte < box.row_bytes; byte += 16) {
      const int64_t from = std::clamp<int64_t>(inside_from - byte, 0, 16);
      const int64_t to = is_inside ? std::clamp<int64_t>(inside_to - byte, from, 16) : from;
      const uint32_t linear = box.offset + row * box.row_bytes + static_cast<uint32_t>(byte);
      visit(swizzle(linear, map.swizzle_bytes), static_cast<uint32_t>(from), static_cast<uint32_t>(to),
            address + static_cast<uint64_t>(byte));
    }
  }
}

inline void check_rows(const Box& box, bool writes, const Cta* cta, const char* what) {
  const Buffer* tensor = find_buffer(box.map.tensor, 1);
  if (!tensor)
    fail(std::string(what) + ": the tensor map's tensor is not in global memory: " + describe_address(box.map.tensor));
  visit_chunks(box, 0, box.rows, [&](uint32_t, uint32_t from, uint32_t to, uint64_t address) {
    if (from == to) return;
    const Buffer& buffer = check_global(address + from, to - from, writes, cta, what);
    if (&buffer != tensor)
      fail(std::string(what) + ": the tensor map of `" + tensor->name + "` reaches into `" + buffer.name + "`");
  });
}

// Words of a box that loads may not rely on: this kernel has written them, or a peer, and they are not known here yet. They land as
// other bytes.
inline std::set<uint64_t> words_hidden_from_tma(const Box& box) {
  std::set<uint64_t> hidden;
  const bool is_of_kernel = machine->mapped.count(find_buffer(box.map.tensor, 1));
  if (!is_of_kernel && !machine->launch.other_ranks) return hidden;
  visit_chunks(box, 0, box.rows, [&](uint32_t, uint32_t from, uint32_t to, uint64_t address) {
    for (uint64_t word = address + from / 4 * 4; word < address + to; word += 4)
      if ((is_of_kernel && !is_shown_to_tma(word)) || !is_known_to_tma(*find_buffer(word, 1), word)) hidden.insert(word);
  });
  return hidden;
}

inline void land(Cta* cta, uint32_t barrier_offset, Range range, const std::function<void(Mbarrier&)>& copy,
                 const std::string& what = "a TMA load") {
  if (cta->live_threads == 0)
    throw Failure{what + (" lands in CTA " + text(cta->index)) + ", which has exited"};
  Mbarrier& barrier = mbarrier_at(cta, barrier_offset, (what + ", landing").c_str());
  copy(barrier);
  barrier.bytes -= range.bytes;
  --cta->loads_in_flight;
  check_bytes(barrier, (what + ", landing").c_str());
  advance_if_complete(barrier);
}

inline void check_signal(Cta* cta, uint32_t barrier_offset, const char* what) {
  if (!mbarrier_at(cta, barrier_offset, what).is_fenced)
    fail(std::string(what) + ": " + at(barrier_offset) + " of CTA " + text(cta->index) +
         " is not visible to TMA: fence_mbarrier_init is missing after mbarrier_init");
}

inline void load_box(const TensorMap* map, uint64_t* barrier, void* destination, std::initializer_list<int32_t> corner,
                     uint32_t cta_mask, const char* what) {
  yield();
  const Box box = make_box(map, destination, corner, what);
  const uint32_t barrier_offset = shared_offset(barrier, 8, 8, what);
  check_rows(box, false, self->cta, what);
  const auto hidden = std::make_shared<std::set<uint64_t>>(words_hidden_from_tma(box));
  if (cta_mask == 0 || cta_mask >> self->cta->cluster->ctas.size())
    fail(std::string(what) + ": the CTA mask " + text(cta_mask) + " does not fit a cluster of " +
         text(self->cta->cluster->ctas.size()));
  for (uint32_t rank = 0; rank < self->cta->cluster->ctas.size(); ++rank) {
    if (!(cta_mask >> rank & 1)) continue;
    Cta* cta = peer(rank, what);
    check_signal(cta, barrier_offset, what);
    poison(cta, {box.offset, box.row_bytes * box.rows});
    const uint32_t pieces = box.rows > 1 ? 1 + random_below(3) : 1;
    for (uint32_t i = 0; i < pieces; ++i) {
      const uint32_t first = box.rows * i / pieces, end = box.rows * (i + 1) / pieces;
      if (first == end) continue;
      ++cta->loads_in_flight;
      ++machine->maps_in_use[map];
      later(machine->bias.load_delay, [=] {
        --machine->maps_in_use[map];
        const Range range{box.offset + first * box.row_bytes, (end - first) * box.row_bytes};
        land(cta, barrier_offset, range, [&](Mbarrier& barrier_there) {
          visit_chunks(box, first, end, [&](uint32_t shared, uint32_t from, uint32_t to, uint64_t address) {
            std::memset(cta->async + shared, 0, 16);
            if (from < to)
              std::memcpy(cta->async + shared + from, reinterpret_cast<const void*>(address + from), to - from);
            for (auto word = hidden->lower_bound(address + from); word != hidden->end() && *word < address + to; ++word)
              std::memset(cta->async + shared + (*word - address), kPoison, 4);
          });
          barrier_there.landed.push_back({barrier_there.phase, range});
        });
      });
    }
  }
  ++machine->stats.loads;
  yield();
}

inline void check_bulk(uint64_t address, uint32_t bytes, const char* direction, const char* what) {
  if (bytes == 0 || bytes % 16 || address % 16)
    fail(std::string(what) + ": " + text(bytes) + " bytes " + direction + " " + describe_address(address) +
         ": expected whole 16 bytes");
}

inline void load_bulk(uint64_t* barrier, void* destination, const void* global, uint32_t bytes, const char* what) {
  yield();
  const auto address = reinterpret_cast<uint64_t>(global);
  check_bulk(address, bytes, "from", what);
  const uint32_t offset = shared_offset(destination, bytes, 16, what);
  const uint32_t barrier_offset = shared_offset(barrier, 8, 8, what);
  const Buffer& buffer = check_global(address, bytes, false, self->cta, what);
  if (machine->launch.other_ranks) check_no_news(buffer, address, bytes, what), check_not_held(buffer, address, bytes, what);
  Cta* cta = self->cta;
  check_signal(cta, barrier_offset, what);
  poison(cta, {offset, bytes});
  const uint32_t pieces = std::min(bytes / 16, 1 + random_below(3));
  for (uint32_t i = 0; i < pieces; ++i) {
    const uint32_t first = bytes / 16 * i / pieces * 16, end = bytes / 16 * (i + 1) / pieces * 16;
    ++cta->loads_in_flight;
    later(machine->bias.load_delay, [=] {
      const Range range{offset + first, end - first};
      const auto copy = [&](Mbarrier& barrier_there) {
        std::memcpy(cta->async + range.offset, reinterpret_cast<const void*>(address + first), range.bytes);
        barrier_there.landed.push_back({barrier_there.phase, range});
      };
      land(cta, barrier_offset, range, copy, what);
    });
  }
  ++machine->stats.loads;
  yield();
}

// A prefetch has no effect that a kernel could observe.
inline void prefetch_box(const TensorMap* map, std::initializer_list<int32_t> corner, const char* what) {
  make_box(map, corner, what);
  ++machine->stats.prefetches;
}

inline void add_floats(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 4) {
    float sum, addend;
    std::memcpy(&sum, to + i, 4);
    std::memcpy(&addend, from + i, 4);
    sum += addend;
    std::memcpy(to + i, &sum, 4);
  }
}

inline void store_box(const TensorMap* map, const void* source, std::initializer_list<int32_t> corner, bool adds,
                      const char* what) {
  yield();
  const Box box = make_box(map, source, corner, what);
  if (is_in_global_memory(map)) fail(std::string(what) + ": maps that kernels make are modelled for loads alone");
  if (adds && !map->is_f32) fail(std::string(what) + ": modelled for FP32 alone");
  check_rows(box, true, self->cta, what);
  Cta* cta = self->cta;
  self->uncommitted.push_back([=](const std::shared_ptr<StoreGroup>& group) {
    ++group->unread, ++group->unwritten;
    later(machine->bias.store_delay, [=] {
      auto bytes = std::make_shared<std::vector<uint8_t>>();
      bytes->reserve(box.rows * box.row_bytes);
      visit_chunks(box, 0, box.rows, [&](uint32_t shared, uint32_t, uint32_t, uint64_t) {
        bytes->insert(bytes->end(), cta->async + shared, cta->async + shared + 16);
      });
      if (--group->unread == 0) wake(group->waiting);
      later(machine->bias.store_delay, [=] {
        const uint8_t* chunk = bytes->data();
        visit_chunks(box, 0, box.rows, [&](uint32_t, uint32_t from, uint32_t to, uint64_t address) {
          if (adds)
            add_floats(reinterpret_cast<uint8_t*>(address + from), chunk + from, to - from);
          else if (from < to)
            std::memcpy(reinterpret_cast<void*>(address + from), chunk + from, to - from);
          chunk += 16;
        });
        if (--group->unwritten == 0) wake(group->waiting);
      });
    });
  });
  ++machine->stats.stores;
  yield();
}

// A peer sees these bytes as news, like the bytes of other stores. All have arrived when the kernel has ended.
inline void land_bytes(uint64_t address, const std::vector<uint8_t>& bytes) {
  const Buffer& buffer = *find_buffer(address, bytes.size());
  std::memcpy(reinterpret_cast<void*>(address), bytes.data(), bytes.size());
  if (uint8_t* news = news_at(buffer, address))
    std::memset(news, is_of_peer(buffer) ? static_cast<uint8_t>(machine->launch.rank + 1) : 0, bytes.size() / 4);
}

inline void store_bulk(void* global, const void* source, uint32_t bytes, const char* what) {
  yield();
  const auto address = reinterpret_cast<uint64_t>(global);
  check_bulk(address, bytes, "to", what);
  const uint32_t offset = shared_offset(source, bytes, 16, what);
  check_global(address, bytes, true, self->cta, what);
  Cta* cta = self->cta;
  self->uncommitted.push_back([=](const std::shared_ptr<StoreGroup>& group) {
    ++group->unread, ++group->unwritten;
    later(machine->bias.store_delay, [=] {
      const std::vector<uint8_t> read(cta->async + offset, cta->async + offset + bytes);
      if (--group->unread == 0) wake(group->waiting);
      later(machine->bias.store_delay, [=] {
        land_bytes(address, read);
        if (--group->unwritten == 0) wake(group->waiting);
      });
    });
  });
  ++machine->stats.stores;
  yield();
}

// Waits until TMA has read all groups except the `pending` newest; groups end in any order. Drops the first ones if written.
void tma_store_wait_read(uint32_t pending) {
  yield();
  auto& groups = self->store_groups;
  for (size_t i = 0; i + pending < groups.size(); ++i) {
    const auto group = groups[i];
    while (group->unread)
      block(group->waiting, {"tma_store_wait_read", [] { return std::string("for a store of its own that TMA has not read"); }});
  }
  while (!groups.empty() && groups.front()->unwritten == 0) groups.pop_front();
  yield();
}

}  // namespace sim

namespace ptx {

void prefetch_l2(const void*) { ++machine->stats.prefetches; }
void prefetch_tensormap(const TensorMap* map) {
  check_use_of_map(map, "prefetch_tensormap");
}

void tma_prefetch_2d(const TensorMap* map, int32_t c0, int32_t c1) { prefetch_box(map, {c0, c1}, "tma_prefetch_2d"); }
void tma_prefetch_3d(const TensorMap* map, int32_t c0, int32_t c1, int32_t c2) {
  prefetch_box(map, {c0, c1, c2}, "tma_prefetch_3d");
}
void tma_prefetch_4d(const TensorMap* map, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  prefetch_box(map, {c0, c1, c2, c3}, "tma_prefetch_4d");
}

void tma_load_2d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1) {
  load_box(map, barrier, destination, {c0, c1}, 1u << self->cta->rank, "tma_load_2d");
}
void tma_load_2d_evict_first(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1) {
  load_box(map, barrier, destination, {c0, c1}, 1u << self->cta->rank, "tma_load_2d_evict_first");
}
void tma_load_2d_multicast(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                           uint32_t cta_mask) {
  load_box(map, barrier, destination, {c0, c1}, cta_mask, "tma_load_2d_multicast");
}
void tma_load_3d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1, int32_t c2) {
  load_box(map, barrier, destination, {c0, c1, c2}, 1u << self->cta->rank, "tma_load_3d");
}
void tma_load_3d_evict_first(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1,
                             int32_t c2) {
  load_box(map, barrier, destination, {c0, c1, c2}, 1u << self->cta->rank, "tma_load_3d_evict_first");
}
void tma_load_3d_multicast(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1, int32_t c2,
                           uint32_t cta_mask) {
  load_box(map, barrier, destination, {c0, c1, c2}, cta_mask, "tma_load_3d_multicast");
}
void tma_load_4d(const TensorMap* map, uint64_t* barrier, void* destination, int32_t c0, int32_t c1, int32_t c2,
                 int32_t c3) {
  load_box(map, barrier, destination, {c0, c1, c2, c3}, 1u << self->cta->rank, "tma_load_4d");
}

// st.async. As with TMA, only threads that have waited for the mbarrier see the data; TMA and WGMMA see it only after a
// fence by such a thread. Until then the destination is poison, so that a late read of the old data is detected.
template <typename T>
void send(void* pointer, uint64_t* barrier, uint32_t rank, const T& value, const char* what) {
  constexpr uint32_t kBytes = sizeof(T);
  yield();
  Cta* cta = peer(rank, what);
  const uint32_t offset = shared_offset(pointer, kBytes, kBytes, what);
  const uint32_t barrier_offset = shared_offset(barrier, 8, 8, what);
  check_signal(cta, barrier_offset, what);
  poison(cta, {offset, kBytes});
  ++cta->loads_in_flight;
  later(machine->bias.store_delay, [=] {
    const auto keep = [&](Mbarrier& barrier_there) {
      Sent sent = {barrier_there.phase, {offset, kBytes}, {}, false};
      std::memcpy(sent.bytes, &value, kBytes);
      barrier_there.sent.push_back(sent);
    };
    land(cta, barrier_offset, {offset, kBytes}, keep, what);
  });
}
void st_async_v4_f32(void* pointer, uint64_t* barrier, uint32_t rank, float x, float y, float z, float w) {
  send(pointer, barrier, rank, Float4{x, y, z, w}, "st_async_v4_f32");
}
void st_async_v2_b32(void* pointer, uint64_t* barrier, uint32_t rank, uint32_t a, uint32_t b) {
  send(pointer, barrier, rank, Uint2{a, b}, "st_async_v2_b32");
}
void st_async_b32(void* pointer, uint64_t* barrier, uint32_t rank, uint32_t value) {
  send(pointer, barrier, rank, value, "st_async_b32");
}

void tma_store_2d(const TensorMap* map, const void* source, int32_t c0, int32_t c1) {
  store_box(map, source, {c0, c1}, false, "tma_store_2d");
}
void tma_store_3d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2) {
  store_box(map, source, {c0, c1, c2}, false, "tma_store_3d");
}
void tma_store_4d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  store_box(map, source, {c0, c1, c2, c3}, false, "tma_store_4d");
}
void tma_reduce_add_2d(const TensorMap* map, const void* source, int32_t c0, int32_t c1) {
  store_box(map, source, {c0, c1}, true, "tma_reduce_add_2d");
}
void tma_reduce_add_3d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2) {
  store_box(map, source, {c0, c1, c2}, true, "tma_reduce_add_3d");
}
void tma_reduce_add_4d(const TensorMap* map, const void* source, int32_t c0, int32_t c1, int32_t c2, int32_t c3) {
  store_box(map, source, {c0, c1, c2, c3}, true, "tma_reduce_add_4d");
}

void bulk_load(uint64_t* barrier, void* destination, const void* global, uint32_t bytes) {
  load_bulk(barrier, destination, global, bytes, "bulk_load");
}
void bulk_store(void* global, const void* source, uint32_t bytes) { store_bulk(global, source, bytes, "bulk_store"); }

void tma_store_commit() {
  yield();
  auto group = std::make_shared<StoreGroup>();
  for (const auto& store : self->uncommitted) store(group);
  self->uncommitted.clear();
  self->store_groups.push_back(group);
  yield();
}

}  // namespace ptx
