// Clusters: their barrier, and accesses to the shared memory of other CTAs.
#pragma once
#include "warps.h"

namespace sim {

inline void recheck_cluster_barrier(Cluster* cluster) {
  if (cluster->arrived == 0 || cluster->arrived != cluster->live_threads) return;
  cluster->arrived = 0;
  ++cluster->generation;
  wake(cluster->waiting);
}

// Returns the CTA with that rank. It must be known to have started, and must not have exited.
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

}  // namespace sim

namespace ptx {

uint32_t cluster_rank() { return self->cta->rank; }

void cluster_arrive() { cluster_arrive_relaxed(); }
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

// For inspection only: the simulator's remote accesses use a pointer and a rank, not this address.
uint32_t mapa(const void* pointer, uint32_t rank) { return rank << 24 | (smem_address(pointer) & 0xffffff); }

}  // namespace ptx
