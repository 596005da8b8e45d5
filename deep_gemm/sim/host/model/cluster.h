// Clusters: their barrier, and shared memory of other CTAs. A store there lands late, at the latest when the storing
// thread next arrives at the cluster's barrier, which releases it.
#pragma once
#include "warps.h"

namespace sim {

inline void recheck_cluster_barrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived != cluster->live_threads) return;
  cluster->arrived = 0;
  ++cluster->generation;
  wake(cluster->waiting);
}

// The CTA of that rank. It must be known to have started, and must not have exited.
inline Cta* peer(uint32_t rank, const char* what) {
  Cluster* cluster = self->cta->cluster;
  if (rank >= cluster->ctas.size())
    fail(std::string(what) + ": rank " + text(rank) + " in a cluster of " + text(cluster->ctas.size()));
  Cta* cta = cluster->ctas[rank];
  if (cta == self->cta) return cta;
  if (cluster->generation == 0)
    fail(std::string(what) + ": CTA " + text(cta->index) + " may not have started yet: no cluster barrier stands " +
         "before this access");
  if (cta->live_threads == 0) fail(std::string(what) + ": CTA " + text(cta->index) + " of the cluster has exited");
  return cta;
}

inline void drain(const std::shared_ptr<std::deque<RemoteStore>>& stores, size_t keep) {
  while (stores->size() > keep) {
    if (stores->front().cta->live_threads == 0)
      throw Failure{"a store to shared memory of CTA " + text(stores->front().cta->index) +
                    " lands when that CTA has exited: no cluster barrier stands between"};
    std::memcpy(stores->front().target, stores->front().bytes, stores->front().size);
    stores->pop_front();
  }
}

template <typename T>
void remote_store(void* pointer, uint32_t rank, const T& value, const char* what) {
  yield();
  Cta* cta = peer(rank, what);
  RemoteStore store{cta, cta->generic + shared_offset(pointer, sizeof(T), sizeof(T), what), {}, sizeof(T)};
  std::memcpy(store.bytes, &value, sizeof(T));
  if (!self->remote_stores) self->remote_stores = std::make_shared<std::deque<RemoteStore>>();
  self->remote_stores->push_back(store);
  later(machine->bias.store_delay, [stores = self->remote_stores] {
    if (!stores->empty()) drain(stores, stores->size() - 1);
  });
}

template <typename T>
T remote_load(const void* pointer, uint32_t rank, const char* what) {
  yield();
  const Cta* cta = peer(rank, what);
  if (self->remote_stores) drain(self->remote_stores, 0);  // a thread sees its own stores
  T value;
  std::memcpy(&value, cta->generic + shared_offset(pointer, sizeof(T), sizeof(T), what), sizeof(T));
  return value;
}

}  // namespace sim

namespace ptx {

uint32_t cluster_rank() { return self->cta->rank; }

void cluster_arrive() {
  if (self->remote_stores) drain(self->remote_stores, 0);
  cluster_arrive_relaxed();
}
void cluster_arrive_relaxed() {
  yield();
  gather("cluster_arrive", 0);
  if (self->has_arrived) fail("cluster_arrive: a second arrival without cluster_wait between");
  Cluster* cluster = self->cta->cluster;
  self->has_arrived = true;
  self->arrived_generation = cluster->generation;
  ++cluster->arrived;
  recheck_cluster_barrier(cluster);
  yield();
}
void cluster_wait() {
  yield();
  gather("cluster_wait", 0);
  if (!self->has_arrived) fail("cluster_wait without cluster_arrive");
  Cluster* cluster = self->cta->cluster;
  while (cluster->generation == self->arrived_generation)
    block(cluster->waiting, {"waits at the cluster's barrier, where", [cluster] {
                               return text(cluster->arrived) + " of " + text(cluster->live_threads) +
                                      " threads have arrived";
                             }});
  self->has_arrived = false;
  yield();
}
void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// For inspection only: the simulator's remote accesses take (pointer, rank).
uint32_t mapa(const void* pointer, uint32_t rank) { return rank << 24 | smem_address(pointer); }

void st_shared_cluster_f32(void* p, uint32_t rank, float value) {
  remote_store(p, rank, value, "st_shared_cluster_f32");
}
void st_shared_cluster_v4_f32(void* p, uint32_t rank, float x, float y, float z, float w) {
  remote_store(p, rank, Float4{x, y, z, w}, "st_shared_cluster_v4_f32");
}
float ld_shared_cluster_f32(const void* p, uint32_t rank) {
  return remote_load<float>(p, rank, "ld_shared_cluster_f32");
}
Float4 ld_shared_cluster_v4_f32(const void* p, uint32_t rank) {
  return remote_load<Float4>(p, rank, "ld_shared_cluster_v4_f32");
}

}  // namespace ptx
