// Which tiles a CTA computes where groups are along k, in which order. The thread that loads finds them, and deals them to
// the math warps through the queue of tile_queue.cuh.
//
// All groups have the same tiles, which are counted through, the deepest group first. Each cluster has the tile of its own
// number first, and comes for another one whenever it is about to load: groups may be very unequal, and SMs differ by 2% in
// what they take for a tile. So at the end nobody waits for longer than a tile takes, and the last tiles are the shortest.
//
// A cluster that multicasts A takes two tiles at a time, neighbours along n, of which the second lies outside D where their
// number is odd. Such pairs are made within a group and counted as one: its CTAs never are in two groups, whose depths
// may differ, and come to the end of their tiles together.
#pragma once
#include "config.cuh"
#include "groups.cuh"
#include "k_groups.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
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

// Through it the first CTA of a cluster tells the other one which tiles they take next.
struct NumberMail {
  uint64_t full, empty;
  uint32_t number;

  DEVICE void init() {
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_init(&empty, 1);
  }

  // `turn` counts what has been sent and received before.
  DEVICE void send(uint32_t sent, uint32_t turn) {
    ptx::mbarrier_wait_parity(&empty, (turn & 1) ^ 1);
    ptx::st_async_b32(&number, &full, 1, sent);
  }

  // Behind the last number, `end` or greater, nothing comes, and the first CTA may be gone.
  DEVICE uint32_t receive(uint32_t turn, uint32_t end) {
    ptx::mbarrier_arrive_expect_tx(&full, sizeof(number));  // it may have come already
    ptx::mbarrier_wait_parity_cluster(&full, turn & 1);
    const uint32_t received = ptx::ld_shared_b32(&number);
    if (received < end) ptx::mbarrier_arrive_cluster(&empty, 0);
    return received;
  }
};

struct KScheduler {
  const Groups& groups;
  NumberMail& mail;
  uint32_t tiles_m, tiles_n, num_tiles;
  uint32_t turn = 0;
  uint32_t come_for_before = 0;  // when this cluster last came for a tile
  uint32_t known = ~0u;          // in that order, the group whose maps this thread may use

  DEVICE KScheduler(const Groups& groups_, uint32_t m, uint32_t n, NumberMail& mail_)
      : groups(groups_),
        mail(mail_),
        tiles_m(ceil_div(m, kBlockM)),
        tiles_n(ceil_div(n, kBlockN * kClusterN)),
        num_tiles(tiles_m * tiles_n * groups.count) {}

  // The number of the cluster's next tiles. It was come for a tile ago: the answer of the L2 keeps nobody waiting.
  DEVICE uint32_t next_number() {
    const bool is_first_cta = kClusterSize == 1 || ptx::cluster_rank() == 0;
    uint32_t number = ptx::block_index() / kClusterSize;
    if (turn > 0 && is_first_cta) number = ptx::grid_size() / kClusterSize + come_for_before;
    if constexpr (kClusterSize > 1) {
      if (turn > 0 && is_first_cta) mail.send(number, turn - 1);
      if (turn > 0 && !is_first_cta) number = mail.receive(turn - 1, num_tiles);
    }
    if (is_first_cta) come_for_before = ptx::atom_add(tiles_come_for(groups.k_groups, groups.count), 1);
    ++turn;
    return number;
  }

  // By one thread. The maps of the tile's group are then on their way, and may be used.
  DEVICE bool next(KTile& next) {
    const uint32_t number = next_number();
    if (number >= num_tiles) return false;

    const uint32_t tiles = tiles_m * tiles_n;
    // Where all rows of A stay in the L2, tiles go down all of them: 0.3% at depth 2048 (4096 rows, an H200).
    const uint32_t height = tiles_m <= 2 * kRasterGroup ? tiles_m : kRasterGroup;
    const TileIndex index = place_in_raster(number % tiles, tiles_m, tiles_n, height);
    next.tile.row_m = index.m * kBlockM;
    next.tile.row_n = tile_of_cta<kClusterN>(index.n) * kBlockN;

    const uint32_t group = number / tiles;
    next.k_group = groups.k_groups + group;
    if (group != known) {
      ptx::fence_tensormap_acquire(&next.k_group->map_a);
      ptx::fence_tensormap_acquire(&next.k_group->map_b);
      ptx::prefetch_tensormap(&next.k_group->map_a);
      ptx::prefetch_tensormap(&next.k_group->map_b);
      known = group;
    }
    next.first_k_block = ptx::ld_global_b32(&next.k_group->first_k_block);
    next.tile.num_k_blocks = ptx::ld_global_b32(&next.k_group->num_k_blocks);
    next.tile.group = ptx::ld_global_b32(&next.k_group->group);
    return true;
  }
};
