// What differs between kinds of products. config.cuh names one file of each kind; a new kind is a new file. Each file gives
// these to the kernel and to the main loop:
//
// WORK (work): which tiles a CTA computes, what TMA loads for them, and where they lie in D
//   Params                           the kernel's parameters: Product, and what this kind adds; of rows in a file, ROWS_PARAMS
//   WorkStorage                      shared memory of this kind; init() by one thread
//   Tile, TileToLoad                 where a tile of D begins, and what else the math warps, the loading thread need to know
//   Tiles(p, storage)                a CTA's tiles, in order; all of its roles go through the same ones
//     load_all(load)                   by the loading thread: calls `load` with each tile
//     find_for_others(warp)            by the producer's other warps
//     next(tile)                       by a math warp: false behind the last tile
//     finish(tile)                     called by a math warp after multiplying: reads the rest of the tile's description
//   Share                            the units of a tile that a warpgroup computes: set(tile, warpgroup), is_any, is_part, with(total, use)
//   k_blocks_of(p, tile)             the k-blocks that this CTA multiplies
//   TileLoad(p, tile)                load_slot(slot, k_block, k) asks TMA for what one slot needs, in all slot_bytes
//   WeightAhead                      B of some slots, ahead of the rest, before the kernel ahead has ended: kIsLoaded, or none
//     load(p, shared)                  by the loading thread; load_all then gives `load` a number of slots beside a tile
//     load_rest(load, slot, k_block)   behind griddepcontrol_wait, for each of these slots
//   prefetch_operand_maps(p)
//   sfb_of(p, tile), c_of(p, tile)   B's scales, and C, of the tile's group
//   skipped_scales(tile)             how many of A's scales are loaded ahead of the tile's own
//   Destination(p, tile, end_row)    D: store(panel, column, row), prefetch(column, row)
//
// EPILOGUE (epilogue): how accumulators become D
//   OutputStorage, OutputBarriers    shared memory; init() of the barriers by one thread
//   Output(storage, barriers, warpgroup)  what becomes of a warpgroup's tiles; finish() behind the last one
//     expect(p, tile)                  before a tile is multiplied: asks for what its stores will need
//     store_tile(p, tile, total)
//   store_tiles(p, storage, barriers, tiles, which)  by the producer's last warps, if these store what math warps leave
//   prefetch_output_map(p), prefetch_d(p, tile, k_block, end)
//   leave()                          by all threads of the CTA, at last
//
// CONVERT (convert): how B becomes what WGMMA reads
//   ConvertStorage                   shared memory; init() of its barriers; full_of_b(full, stage), the barrier that counts B's bytes
//   Passes(storage)                  again<kIsWarp>(), asked after a tile's k-blocks by all that go through them: once more?
//   scale_tiles(p, shared, tiles, which)    by the producer's last warps
//   convert_tiles(p, shared, tiles, group)  by the converting warpgroups
//
// MAINLOOP: mainloop.cuh for operands with scales; mainloop_of_slice.cuh and mainloop_of_slices.cuh for BF16
//   Operands(a, b, scales, warpgroup)  where a warpgroup's operands lie in the ring's first slot
//   FirstScales, begin_scales(p, tile, first)  what a tile needs of scales before it can begin
//   multiply_tile(p, ring, operands, first, tile, at, passes, share, output, total), skip_tile(p, ring, tile, at, passes)
//
// SCALES (scales), for mainloop.cuh: where the scales are when partial sums are promoted
//   TileScales                       B's scales under a tile; start(first), then advance(k_block) before every 32nd k-block
//   FirstScales                      those that a tile needs first; TileScales::ask(k_block, first) loads them
//   RunScales<kCount, kPieces>(in_first_slot, of_tile)  the scales of kCount k-blocks in a line, each of kPieces pieces
//     begin_k_block(k_block, k_block_of_32)
//     load_ahead(stage, k_block, piece), load_behind(stage, k_block, piece)  before and behind the piece's WGMMA
//     promote(total, partial, stage, k_block, piece, release_slot)  calls release_slot(loaded) as soon as the slot may go
#pragma once
#include "config.cuh"
#include WORK
#include EPILOGUE
