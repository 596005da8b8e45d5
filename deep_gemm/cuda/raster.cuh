// The order of tiles: down kRasterGroup tiles of m, or as many as the caller says, before it moves on along n, so that the tiles
// in flight share their rows of A and of B in the L2.
#pragma once
#include "config.cuh"
#include "ptx/cluster.cuh"

struct TileIndex {
  uint32_t m, n;
};

DEVICE TileIndex place_in_raster(uint32_t number, uint32_t tiles_m, uint32_t tiles_n, uint32_t max_height = kRasterGroup) {
  const uint32_t group_size = max_height * tiles_n;
  const uint32_t first_m = number / group_size * max_height;
  const uint32_t height = tiles_m - first_m < max_height ? tiles_m - first_m : max_height;
  const uint32_t in_group = number % group_size;
  return {first_m + in_group % height, in_group / height};
}

// Of the kCtas neighbours that a cluster takes at a time along one side, the tile of this CTA.
template <uint32_t kCtas>
DEVICE uint32_t tile_of_cta(uint32_t index_of_cluster) {
  return index_of_cluster * kCtas + (kCtas > 1 ? ptx::cluster_rank() : 0);
}
