// The parts that differ between products. config.cuh names one file for each; a new kind is a new file. This file
// states the members that the kernel and the main loop use. The compiler checks them, and names missing ones.
#pragma once
#include "config.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include CONVERT
#include EPILOGUE
#include MAINLOOP
#include WORK

struct SharedStorage;

// A CTA's tiles, their loads by TMA, and their positions in D. Params is Product with further members of this kind.
// Tile and TileToLoad say where a tile of D begins, and all else that math warps, or the loading thread, must know.
static_assert(requires(const Params& p, WorkStorage& storage, Tiles& tiles, Tile& tile, const TileToLoad& to_load,
                       void load_tile(const TileToLoad&), uint32_t warp) {
  storage.init();               // shared memory for this kind of work; called by one thread
  Tiles(p, storage);            // a CTA's tiles, in order; all its roles iterate over the same tiles
  tiles.load_all(load_tile);    // called by the loading thread: calls `load_tile` with each tile
  tiles.find_for_others(warp);  // called by the producer's other warps
  tiles.next(tile);             // called by a math warp: false after the last tile
  tiles.finish(tile);           // called by a math warp after multiplying: reads the rest of the tile's description
  k_blocks_of(p, tile);         // the k-blocks that this CTA multiplies
  k_blocks_of(p, to_load);
  c_of(p, tile);                // C of the tile's group
  prefetch_operand_maps(p);
}, "WORK: tiles");
static_assert(requires(Share& share, const Tile& tile, uint32_t warpgroup, Totals& total, void use(Totals&)) {
  share.set(tile, warpgroup);  // the units of a tile that a warpgroup computes
  share.is_any;
  share.is_part;
  share.with(total, use);      // calls `use` with the totals of these units
}, "WORK: Share");
static_assert(requires(const Params& p, const TileToLoad& tile, const TileLoad& load, const Slot& slot, uint32_t k_block, uint32_t k) {
  TileLoad(p, tile);
  load.load_slot(slot, k_block, k);  // makes TMA load one slot's data, slot_bytes in all
  load.slot_bytes;
}, "WORK: TileLoad");
static_assert(requires(const Params& p, const Tile& tile, const Destination& d, const uint8_t* panel, uint32_t column, uint32_t row) {
  Destination(p, tile, row);  // positions in D; only the tile's rows before `row` are stored
  d.store(panel, column, row);
  d.prefetch(column, row);    // loads into the L2 the part of D to which a panel is added
  d.span;
}, "WORK, or DESTINATION of dense products");

// Turns accumulators into D.
static_assert(requires(const Params& p, OutputStorage& storage, OutputBarriers& barriers, Output& output, const Tile& tile,
                       const TileToLoad& to_load, Totals& total, uint32_t warpgroup, uint32_t k_block, uint32_t end) {
  barriers.init();                       // called by one thread
  Output(storage, barriers, warpgroup);  // stores a warpgroup's tiles
  output.expect(p, tile);                // called before a tile is multiplied: loads data that its stores will need
  output.store_tile(p, tile, total);
  output.finish();                       // called after the last tile
  prefetch_output_map(p);
  prefetch_d(p, to_load, k_block, end);
  leave();                               // called last, by all threads of the CTA
}, "EPILOGUE");

// Turns B into values that WGMMA can read.
static_assert(requires(const Params& p, SharedStorage& shared, ConvertStorage& storage, Passes& passes, Tiles& tiles,
                       uint64_t* full, uint32_t stage, uint32_t which) {
  storage.init();                          // called by one thread
  storage.full_of_b(full, stage);          // the barrier that counts B's bytes
  Passes(storage);
  passes.again<true>();                    // called by all roles after a tile's k-blocks: true for another pass
  scale_tiles(p, shared, tiles, which);    // called by the producer's last warps
  convert_tiles(p, shared, tiles, which);  // called by the converting warpgroups
}, "CONVERT");

// mainloop.cuh for operands with scales; mainloop_of_slice.cuh and mainloop_of_slices.cuh for BF16.
static_assert(requires(const Params& p, Ring& ring, const uint8_t* a, const uint8_t* b, const float* scales, uint32_t warpgroup,
                       const Operands& operands, FirstScales& first, const Tile& tile, RingPosition& at, Passes& passes,
                       const Share& share, Output& output, Totals& total) {
  Operands(a, b, scales, warpgroup);  // a warpgroup's operands in the ring's first slot
  begin_scales(p, tile, first);       // loads the scales that a tile needs before it can start
  multiply_tile(p, ring, operands, first, tile, at, passes, share, output, total);
}, "MAINLOOP");
