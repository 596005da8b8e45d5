// Which tiles a CTA computes where groups are along k, in which order. The thread that loads finds them, and deals them to
// the math warps through the queue of tile_queue.cuh.
//
// All groups have the same tiles, which are counted through, the deepest group first, and handed out in rounds: a tile for
// each CTA, every other round the other way about. Groups may be very unequal; but whoever has a longer tile than the
// others in one round has a shorter one in the next, and the last tiles, which decide who is last, are the shortest.
//
// A cluster that multicasts A takes two tiles at a time, neighbours along n; where their number is odd the last one lies
// outside D, as in scheduler.cuh. Pairs are made within a group, and they are what is counted: a cluster's CTAs are never in
// two groups, whose depths may differ, and both come to their last tile with the same k-blocks behind them.
#pragma once
#include "config.cuh"
#include "groups.cuh"
#include "k_groups.cuh"
#include "ptx/cluster.cuh"
#include "ptx/memory.cuh"
#include "ptx/tensormap.cuh"
#include "ptx/warp.cuh"
#include "raster.cuh"
#include "tile_queue.cuh"

// A tile, and where its operands are.
struct KTile {
  Tile tile;
  const KGroup* k_group;
  uint32_t first_k_block;
};

struct KScheduler {
  const KGroup* k_groups;
  uint32_t tiles_m, tiles_n, num_tiles;
  uint32_t first_of_round = 0;
  bool is_backwards = false;
  const KGroup* known = nullptr;  // whose maps this thread may use

  DEVICE KScheduler(const Groups& groups, uint32_t m, uint32_t n)
      : k_groups(groups.k_groups),
        tiles_m(ceil_div(m, kBlockM)),
        tiles_n(ceil_div(n, kBlockN * kClusterN)),
        num_tiles(tiles_m * tiles_n * groups.count) {}

  // By one thread. The maps of the tile's group are then on their way, and may be used.
  DEVICE bool next(KTile& next) {
    const uint32_t clusters = ptx::grid_size() / kClusterSize, cluster = ptx::block_index() / kClusterSize;
    const uint32_t number = first_of_round + (is_backwards ? clusters - 1 - cluster : cluster);
    if (number >= num_tiles) return false;
    first_of_round += clusters;
    is_backwards = !is_backwards;

    const uint32_t tiles = tiles_m * tiles_n;
    const TileIndex index = place_in_raster(number % tiles, tiles_m, tiles_n);
    next.tile.row_m = index.m * kBlockM;
    next.tile.row_n = (index.n * kClusterN + (kClusterN > 1 ? ptx::cluster_rank() : 0)) * kBlockN;

    next.k_group = k_groups + number / tiles;
    if (next.k_group != known) {
      ptx::fence_tensormap_acquire(&next.k_group->map_a);
      ptx::fence_tensormap_acquire(&next.k_group->map_b);
      ptx::prefetch_tensormap(&next.k_group->map_a);
      ptx::prefetch_tensormap(&next.k_group->map_b);
      known = next.k_group;
    }
    next.first_k_block = ptx::ld_global_b32(&next.k_group->first_k_block);
    next.tile.num_k_blocks = ptx::ld_global_b32(&next.k_group->num_k_blocks);
    next.tile.group = ptx::ld_global_b32(&next.k_group->group);
    return true;
  }
};
