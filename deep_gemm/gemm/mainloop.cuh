// The loop of one math warpgroup over the k-blocks of a tile: wait for a slot, multiply, promote, release the slot.
#pragma once
#include "config.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
#include "ring.cuh"
#include "slot.cuh"
#include "tile.cuh"
#include CONVERT
#include EPILOGUE
#include SCALES
#include WORK

// SCALES keeps the scales for promotion. Its members are below, with the members of WORK that it needs.
static_assert(requires(const Params& p, const Tile& tile, TileScales& of_tile, FirstScales& first, uint32_t number) {
  sfb_of(p, tile);             // B's scales of the tile's group
  skipped_scales(tile);        // scales of A that TMA loads before the tile's own
  TileScales(p.sfb, p.sfb_stride_n, p.sfb_stride_k, tile.row_n, p.n, number);  // B's scales for the columns of a tile
  of_tile.ask(number, first);  // loads the first scales that a tile needs, from k-block `number` on
  of_tile.start(first);
  of_tile.advance(number);     // before every 32nd k-block
}, "SCALES: TileScales");
static_assert(requires(const ThreadScales& in_first_slot, const TileScales& of_tile,
                       RunScales<kRunKBlocks, kUnitsPerWarpgroup * kParts, kParts>& scales, uint32_t stage, uint32_t k_block,
                       uint32_t piece, float (&sums)[kUnitN / 2], void release_slot(float)) {
  RunScales<kRunKBlocks, kUnitsPerWarpgroup * kParts, kParts>(in_first_slot, of_tile);  // for a run's k-blocks and their pieces
  scales.begin_k_block(k_block, k_block);     // the second argument counts k-blocks since the last `advance`
  scales.load_ahead(stage, k_block, piece);   // called before the piece's WGMMA is issued
  scales.load_behind(stage, k_block, piece);  // called after the WGMMA is issued
  scales.promote(sums, sums, stage, k_block, piece, release_slot);  // calls release_slot(loaded) once the slot may be reused
}, "SCALES: RunScales");

// One math thread's operands in the ring's first slot: descriptors (their low words) of its warpgroup's first rows of A
// and of all of B, and scales. The loop adds multiples of a slot's size.
struct Operands {
  uint32_t a, b;
  ThreadScales scales;

  DEVICE Operands(const uint8_t* first_a, const uint8_t* first_b, const float* first_scales, uint32_t warpgroup)
      : a(ptx::smem_descriptor_low(ptx::smem_address(first_a) + warpgroup * 64 * kBlockK)),
        b(ptx::smem_descriptor_low(ptx::smem_address(first_b))),
        scales(first_scales, warpgroup) {}
};

// Multiplies one piece of one slot, from zero: 64 rows of A by kUnitN rows of B, under one scale of A and one of B.
template <uint32_t kOfUnit>
DEVICE void issue_piece(float (&partial)[kUnitN / 2], uint32_t a_low, uint32_t b_low) {
  ptx::wgmma_fence();
  if constexpr (kOfUnit == 1) {
    ptx::wgmma_m64k128_e4m3<kUnitN, kExponentBitsOfB>(partial, a_low, b_low);
  } else {
#pragma unroll
    for (uint32_t k = 0; k < kBlockK / kOfUnit; k += 32)
      ptx::wgmma_m64k32_e4m3<kUnitN, kExponentBitsOfB>(partial, ptx::smem_descriptor_from_low(a_low + k / 16),
                                                       ptx::smem_descriptor_from_low(b_low + k / 16), k != 0);
  }
  ptx::wgmma_commit_group();
}

// Multiplies the next kCount k-blocks as they arrive, and promotes each into `total`, piece by piece.
//
// With two sets of partial sums the tensor cores multiply a piece while the previous piece is promoted. Only in a
// straight line of code: ptxas serializes all WGMMAs of a loop if accumulators are in flight at its end (note C7514).
//
// Scales are loaded before the WGMMAs are issued if possible: loads issued later wait for the warp's own WGMMAs, and
// ptxas makes the next WGMMA wait for the instructions that use the scales.
template <uint32_t kCount, uint32_t kOfUnit = kParts, uint32_t kUnits>
DEVICE void multiply_k_blocks(Ring& ring, const Operands& operands, const TileScales& tile_scales,
                              uint32_t k_block_of_32, RingPosition& at, bool& is_loaded, bool is_part,
                              float (&total)[kUnits][kUnitN / 2]) {
  constexpr uint32_t kPieces = kUnits * kOfUnit, kLag = kNumPartials - 1;  // pieces of a k-block
  RingPosition slots[kCount];
  RunScales<kCount, kPieces, kOfUnit> scales(operands.scales, tile_scales);
  float partial[kNumPartials][kUnitN / 2];
#pragma unroll
  for (uint32_t i = 0; i < kCount * kPieces + kLag; ++i) {
    // With kBranchesOnParts a run is one k-block; a short tile has no more products with its slot here.
    if (kBranchesOnParts && i == kUnitsOfPart && is_part) return release(ring, slots[0], ptx::lane_index());
    if (i < kCount * kPieces) {
      const uint32_t k_block = i / kPieces, piece = i % kPieces, unit = unit_of_piece<kOfUnit>(piece);
      const uint32_t low = part_of_piece<kOfUnit>(piece) * (kBlockK / kOfUnit / 16);  // of the part, in low words of descriptors
      if (piece == 0) {
        slots[k_block] = at;
        scales.begin_k_block(k_block, k_block_of_32 + k_block);
        if (!is_loaded) wait_until_loaded(ring, at);
      }
      const uint32_t stage = slots[k_block].stage;
      scales.load_ahead(stage, k_block, piece);
      issue_piece<kOfUnit>(partial[i % kNumPartials],
                  operands.a + stage * (kABytes / 16) + row_of_unit(unit) * (kBlockK / 16) + low,
                  operands.b + stage * (kBBytes / 16) + column_of_unit(unit) * (kBlockK / 16) + low);
      scales.load_behind(stage, k_block, piece);
      if (piece + 1 == (kBranchesOnParts ? kUnitsOfPart : kPieces)) {
        // While the tensor cores work, test the next slot; one result for the warp, because WGMMA needs it converged.
        at = at.next();
        is_loaded = ptx::all_sync(ptx::mbarrier_test_wait_parity(&ring.full[at.stage], at.parity));
      }
    }
    if (i >= kLag) {
      const uint32_t done = i - kLag, k_block = done / kPieces, piece = done % kPieces;
      if (i < kCount * kPieces) ptx::wgmma_wait_group<kLag>(); else ptx::wgmma_wait_group<0>();
      scales.promote(total[unit_of_piece<kOfUnit>(piece)], partial[done % kNumPartials], slots[k_block].stage, k_block, piece,
                     [&](float loaded) { release(ring, slots[k_block], ptx::lane_index(), loaded); });
    }
  }
}

// Multiplies `count` k-blocks: whole runs, and the tail that is left.
template <uint32_t kOfUnit, uint32_t kUnits>
DEVICE void multiply_runs(Ring& ring, const Operands& operands, const TileScales& tile_scales, uint32_t count,
                          RingPosition& at, bool& is_loaded, bool is_part, float (&total)[kUnits][kUnitN / 2]) {
  // Hidden from the compiler, which would otherwise compute the value again in each iteration.
  const uint32_t end_of_runs = ptx::opaque(count / kRunKBlocks * kRunKBlocks);
  uint32_t k_block = 0;
#pragma unroll 1
  for (; k_block != end_of_runs; k_block += kRunKBlocks) {
    if constexpr (kFoldsParts) {
      if (!is_loaded) wait_until_loaded(ring, at);
      is_loaded = true;
      if (RunScales<1, kUnits, 1>::parts_fold(operands.scales, at.stage)) {
        multiply_k_blocks<1, 1>(ring, operands, tile_scales, k_block, at, is_loaded, is_part, total);
        continue;
      }
    }
    multiply_k_blocks<kRunKBlocks, kOfUnit>(ring, operands, tile_scales, k_block, at, is_loaded, is_part, total);
  }
  if constexpr (kHasTail)
#pragma unroll 1
    for (; k_block < count; ++k_block)
      multiply_k_blocks<1, kOfUnit>(ring, operands, tile_scales, k_block, at, is_loaded, is_part, total);
}

// Only scales that are constant along k need these functions: scales/whole.cuh has its own.
template <typename... Any>
DEVICE void ask_factors(Any&&...) {}
template <typename... Any>
DEVICE void multiply_by_factors(Any&&...) {}

// A kind of work whose tiles are of two products defines this function itself.
template <typename Tile>
DEVICE TileScales scales_of_b(const Params& p, const Tile& tile) {
  return TileScales(sfb_of(p, tile), p.sfb_stride_n, p.sfb_stride_k, tile.row_n, p.n, k_blocks_of(p, tile).end);
}

// Loads the scales of B that a tile's first k-blocks need.
DEVICE void begin_scales(const Params& p, const Tile& tile, FirstScales& first) {
  const KBlocks k_blocks = k_blocks_of(p, tile);
  if (!k_blocks.are_none()) scales_of_b(p, tile).ask(k_blocks.first, first);
  ask_factors(p, tile, first);
}

// Multiplies the k-blocks of one tile. With kMixesParts the first product promotes whole k-blocks, the second their parts;
// OfTile is Tile, a template parameter because other kinds of tiles have no is_second.
template <uint32_t kUnits, typename OfTile = Tile>
DEVICE void multiply_tile(const Params& p, Ring& ring, Operands operands, const FirstScales& first_scales,
                          const OfTile& tile, RingPosition& at, Passes& passes, const Share& share, Output&,
                          float (&total)[kUnits][kUnitN / 2]) {
  const KBlocks k_blocks = k_blocks_of(p, tile);
#pragma unroll
  for (auto& unit : total)
#pragma unroll
    for (float& x : unit) x = 0;

  TileScales tile_scales = scales_of_b(p, tile);
  tile_scales.start(first_scales);
  operands.scales.sfa += skipped_scales(tile);
  bool is_loaded = false;  // true if the current slot is known to be loaded
  if constexpr (!kLoopsInBatches)
    return multiply_runs<kParts>(ring, operands, tile_scales, k_blocks.end, at, is_loaded, share.is_part, total);
  do {
    for (uint32_t first = k_blocks.first; first < k_blocks.end; first += 32) {
      tile_scales.advance(first);
      const uint32_t count = k_blocks.end - first < 32 ? k_blocks.end - first : 32;
      if constexpr (kMixesParts) {
        if (!tile.is_second) {
          multiply_runs<1>(ring, operands, tile_scales, count, at, is_loaded, share.is_part, total);
          continue;
        }
      }
      multiply_runs<kParts>(ring, operands, tile_scales, count, at, is_loaded, share.is_part, total);
    }
  } while (passes.again<true>());
  multiply_by_factors(total, first_scales);
}
