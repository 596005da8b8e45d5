// The order in which CTAs compute tiles if groups are along k. The loading thread finds a CTA's tiles.
//
// All groups have equally many tiles, which are numbered from the deepest group on. A cluster begins with the tile of
// its own number, and claims another tile before it loads one: groups may be very unequal, and some SMs are slower than
// others. So at the end no SM waits longer than a tile takes, and the last tiles are the shortest.
//
// A cluster that multicasts A computes two tiles at a time, neighbours along n. If the number of tiles along n is odd,
// the last pair's second tile is outside D. A pair has one number, and both tiles are in one group: groups may differ
// in depth, and the CTAs of a cluster must finish their tiles together.
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tensormap.cuh"
#include "tile.cuh"
#include "work/k_groups.cuh"

// A mailbox in which the first CTA of a cluster sends the other CTA the number of their next tiles.
struct NumberMail {
  uint64_t full, empty;
  uint32_t number;

  DEVICE void init() {
    ptx::mbarrier_init(&full, 1);   // the receiver arrives and announces the bytes, which arrive later
    ptx::mbarrier_init(&empty, 1);  // the receiver arrives once it has read
  }

  // `turn` counts the numbers that were sent and received before.
  DEVICE void send(uint32_t sent, uint32_t turn) {
    ptx::mbarrier_wait_parity(&empty, (turn & 1) ^ 1);
    ptx::st_async_b32(&number, &full, 1, sent);
  }

  // A number of `end` or more is the last one. The receiver does not reply to it, as the first CTA may have exited.
  DEVICE uint32_t receive(uint32_t turn, uint32_t end) {
    ptx::mbarrier_arrive_expect_tx(&full, sizeof(number));  // the number may have landed already
    ptx::mbarrier_wait_parity_cluster(&full, turn & 1);
    const uint32_t received = ptx::ld_shared_b32(&number);
    if (received < end) ptx::mbarrier_arrive_cluster(&empty, 0);
    return received;
  }
};

struct KGroups {
  const KGroup* by_depth;
  uint64_t c_stride;  // from one group's C to the next, in elements
  uint32_t count;
};

struct Tile {
  uint32_t row_m;         // first row of D
  uint32_t row_n;         // first column of D, a row of B
  uint32_t num_k_blocks;  // k-blocks of the tile's group
  uint32_t group;         // plane of C and D
};

// A tile for the loading thread, which must also know where the tile's operands and scales begin.
struct TileToLoad : Tile {
  const KGroup* k_group;
  uint32_t first_k_block;
};

struct KScheduler {
  const KGroups& groups;
  NumberMail& mail;
  uint32_t tiles_m, tiles_n, num_tiles;
  uint32_t turn = 0;
  uint32_t claimed = 0;  // tiles that had been claimed when this cluster last claimed one
  uint32_t known = ~0u;  // the group, in order of depth, whose maps this thread may use

  DEVICE KScheduler(const KGroups& groups_, uint32_t m, uint32_t n, NumberMail& mail_)
      : groups(groups_),
        mail(mail_),
        tiles_m(ceil_div(m, kBlockM)),
        tiles_n(ceil_div(n, kBlockN * kClusterN)),
        num_tiles(tiles_m * tiles_n * groups.count) {}

  // Returns the number of the cluster's next tiles. It was claimed one tile ago, so that no CTA waits for the L2.
  DEVICE uint32_t next_number() {
    const bool is_first_cta = kClusterSize == 1 || ptx::cluster_rank() == 0;
    uint32_t number = ptx::block_index() / kClusterSize;
    if (turn > 0 && is_first_cta) number = ptx::grid_size() / kClusterSize + claimed;
    if constexpr (kClusterSize > 1) {
      if (turn > 0 && is_first_cta) mail.send(number, turn - 1);
      if (turn > 0 && !is_first_cta) number = mail.receive(turn - 1, num_tiles);
    }
    if (is_first_cta) claimed = ptx::atom_add(next_tile_counter(groups.by_depth, groups.count), 1);
    ++turn;
    return number;
  }

  // Called by one thread, which may then use the maps of the tile's group: `next` prefetches them.
  DEVICE bool next(TileToLoad& next) {
    const uint32_t number = next_number();
    if (number >= num_tiles) return false;

    const uint32_t tiles = tiles_m * tiles_n;
    // If all rows of A stay in the L2, consecutive tiles cover all rows before they move on along n.
    const uint32_t height = tiles_m <= 2 * kRasterGroup ? tiles_m : kRasterGroup;
    const TileIndex index = place_in_raster(number % tiles, tiles_m, tiles_n, height);
    next.row_m = index.m * kBlockM;
    next.row_n = tile_of_cta<kClusterN>(index.n) * kBlockN;

    const uint32_t group = number / tiles;
    next.k_group = groups.by_depth + group;
    if (group != known) {
      ptx::fence_tensormap_acquire(&next.k_group->map_a);
      ptx::fence_tensormap_acquire(&next.k_group->map_b);
      ptx::prefetch_tensormap(&next.k_group->map_a);
      ptx::prefetch_tensormap(&next.k_group->map_b);
      known = group;
    }
    next.first_k_block = ptx::ld_global_b32(&next.k_group->first_k_block);
    next.num_k_blocks = ptx::ld_global_b32(&next.k_group->num_k_blocks);
    next.group = ptx::ld_global_b32(&next.k_group->group);
    return true;
  }
};
