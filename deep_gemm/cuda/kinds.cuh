// What differs between kinds of products. config.cuh names one file of each kind; a new kind is a new file. Each file gives
// these to the kernel and to the main loop:
//
// WORK: which tiles a CTA computes, and what TMA loads for them and where it stores them
//   Params                       the kernel's parameters: Product, and what this kind adds
//   WorkStorage                  shared memory for this kind; init() by one thread
//   Tile, TileToLoad             first row and column of a tile of D, and what else the math warps, the loading thread need
//   Tiles(p, storage)            a CTA's tiles, in order; false when there are no more
//     next_to_load(tile)           by the loading thread
//     next_to_multiply(tile, done) by a math warp; `done` is then the tile before
//     find_for_others(p, warp)     by the producer's other warps
//   depth_of(p, tile)            elements of k
//   Share                        what a warpgroup computes of a tile
//     set(tile, warpgroup)         then is_any: anything at all
//     with(units, use)             calls `use` with those of the warpgroup's units that it computes
//   prefetch_operand_maps(p)
//   bytes_of_slot(p, tile)       what load_slot brings into this CTA's slot
//   load_slot(p, slot, tile, k_block)
//   sfb_of(p, tile), c_of(p, tile), skipped_scales(tile)
//   Destination(p, tile, end_row)  where the tile's panels lie in D; store(panel, column, row), prefetch(column, row)
//
// EPILOGUE: which k-blocks a CTA multiplies, and how accumulators become D
//   OutputStorage, OutputBarriers  shared memory; init() of the barriers by one thread
//   KBlocks(k)                   first, end, are_none(): the k-blocks of a tile that this CTA multiplies
//   Output(storage, barriers, warpgroup)
//     store_tile(p, tile, total)
//   prefetch_output_map(p), prefetch_d(p, tile, k_block, end)
//   leave()                      by all threads of the CTA, at last
//
// SCALES: where the scales are when partial sums are promoted
//   FirstScales                  ask(p, tile): those that a tile needs first, before its predecessor is stored
//   TileScales(p, tile, k_blocks)  start(first); advance(k_block) before every 32nd k-block
//   RunScales<kCount, kUnits>(in_first_slot, of_tile)  those of kCount k-blocks in a line, each of kUnits units
//     begin_k_block(k_block, k_block_of_32)
//     load_ahead(stage, k_block, unit), load_behind(stage, k_block, unit)  before and behind the unit's WGMMA
//     promote(total, partial, stage, k_block, unit, release_slot)  release_slot(loaded) as soon as the slot may go
#pragma once
#include "config.cuh"
#include WORK
#include EPILOGUE
#include SCALES
