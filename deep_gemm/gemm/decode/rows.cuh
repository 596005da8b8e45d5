// Products of groups of rows, each with its own B: see decode/product.cuh and work/layout.cuh. CTA i computes the
// layout's tiles i, i + CTAs, ... Its producer's warp finds the tiles in the layout, hands them to the math warps
// through a queue, and loads them. It runs ahead of the math warps, even into the next tile.
#pragma once
#include "decode/product.cuh"
#include "decode/tile.cuh"
#include "work/layout.cuh"
#include "work/padding.cuh"
#include "work/tile_queue.cuh"

struct Params : DecodeMaps, DecodeProduct {
  Groups groups;
  uint64_t sfa_stride, d_stride;  // from one group to the next if each group has its own A and D, in elements; else 0
};

static_assert(kClusterK == 1, "no tile is shared out to several CTAs");

// A tile, and the row where its group ends; the tile after the last one has end_m 0.
struct CtaWork : Work {
  uint32_t end_m = 0, group = 0;

  DEVICE void set(const Params& p, const ptx::Uint4& tile) {
    rank = 0, place = 0;
    row_m = tile.x, row_n = tile.y, end_m = tile.z, group = tile.w;
    k_block = 0, end_k_block = ceil_div(p.k, kBlockK);
  }
};

DEVICE DecodeProduct product_of(const Params& p, const CtaWork& work) {
  DecodeProduct product = p;
  product.m = work.end_m;
  product.sfa += work.group * p.sfa_stride;
  product.sfb += work.group * p.groups.sfb_stride;
  product.d += work.group * p.d_stride * kOutputBytes;
  if constexpr (kWithC) product.c += static_cast<uint64_t>(work.group) * p.n * kCBytes;  // adds the group's bias
  return product;
}

struct Tiles {
  static constexpr bool kIsOnly = false;
  struct Storage {
    TileQueue queue;
    alignas(16) float room[kNumMathWarps][kChunkFloats];  // a warp transposes a chunk here before it stores it

    DEVICE void init() { queue.init(kNumMathWarps); }
  };

  const Params& p;
  Storage& storage;
  CtaWork work{};  // not a tile yet
  uint32_t number = 0;  // tiles that this thread has dealt or taken so far

  template <typename Shared>
  DEVICE Tiles(const Params& p_, Shared& shared) : p(p_), storage(shared.work) {}

  // Called by the producer's warp.
  template <typename Load>
  DEVICE void load_all(const Load& load) {
    if (!p.weight_is_ready) ptx::griddepcontrol_wait();  // the previous kernel may write the layout
    Stretches stretches(storage.queue.window);
    RingPosition at;
    const uint32_t tiles_n = ceil_div(p.n, kBlockN);
    FoundTile found{};
    for (uint32_t next_tile = ptx::block_index(); stretches.find(p.groups, tiles_n, next_tile, found); next_tile += ptx::grid_size()) {
      // Tiles that share rows of B are consecutive.
      const Stretch& rows = found.stretch;
      const uint32_t tiles_m = rows.tiles_m(), tile_n = found.number / tiles_m;
      const ptx::Uint4 tile = {rows.first + (found.number - tile_n * tiles_m) * kBlockTokens, tile_n * kBlockN, rows.end, rows.group};
      work.set(p, tile);
      if (ptx::lane_index() == 0) {  // always the same lane, as it keeps the ring's position
        storage.queue.deal(number, tile);
        load(work, at, number == 0);
      }
      ptx::syncwarp();
      ++number;
    }
    if (ptx::lane_index() == 0) storage.queue.deal(number, {0, 0, 0, 0});
    ptx::syncwarp();
    ptx::griddepcontrol_wait();  // a CTA without tiles has not waited, and the previous kernel may read D's memory
    if (p.groups.zeroes_padding) zero_padding(p.groups, storage.queue.window, p.d, p.d_pitch * kOutputBytes, p.n * kOutputBytes);
  }

  // Called by a math warp.
  DEVICE bool next(CtaWork& next_work) {
    storage.queue.wait_until_dealt(number);
    const ptx::Uint4 dealt = ptx::ld_shared_v4_b32(storage.queue.tile(number));
    // Waits until all lanes have read, and tells the compiler that all have read the same values.
    next_work.set(p, {ptx::shfl_sync(dealt.x, 0), ptx::shfl_sync(dealt.y, 0), ptx::shfl_sync(dealt.z, 0), ptx::shfl_sync(dealt.w, 0)});
    storage.queue.give_back(number, dealt.x, ptx::lane_index() == 0);
    ++number;
    return next_work.end_m != 0;
  }

  // Stores the rows of the tile that are in the group. Each warp uses its own buffer, as the ring is being loaded.
  template <typename Shared>
  DEVICE void store(const DecodeProduct& product, Shared&, const CtaWork& tile, const float (&total)[kAccumulators]) {
    const uint32_t warp = ptx::warp_index();
#pragma unroll
    for (uint32_t i = 0; i < kBlockTokens / 8; ++i)
      if (tile.row_m + i * 8 < tile.end_m)
        store_chunk(product, storage.room[warp], {total[i * 4], total[i * 4 + 1], total[i * 4 + 2], total[i * 4 + 3]},
                    tile.row_m + i * 8, tile.row_n + warp * 16);
  }
};

template <bool kIsB>
DEVICE void load_box(const ptx::TensorMap* map, uint64_t* full, uint8_t* destination, uint32_t k, uint32_t row,
                     const CtaWork& work) {
  ptx::tma_load_3d(map, full, destination, k, row, kIsB || kGroups == kGroupCounts ? work.group : 0);
}

DEVICE uint32_t column_of_d(const DecodeProduct&, uint32_t column) { return column; }
