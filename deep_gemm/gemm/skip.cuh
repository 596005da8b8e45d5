// Skips a tile in which a warpgroup has no work.
#pragma once
#include "ptx/warp.cuh"
#include "ring.cuh"
#include CONVERT
#include WORK

// Releases a tile's slots without reading them.
DEVICE void skip_tile(const Params& p, Ring& ring, const Tile& tile, RingPosition& at, Passes& passes) {
  do {
    for (uint32_t k_block = 0; k_block < k_blocks_of(p, tile).end; ++k_block, at = at.next()) {
      wait_until_loaded(ring, at);
      ptx::syncwarp();
      release(ring, at, ptx::lane_index());
    }
  } while (passes.again<true>());
}
