// B has a scale for each row (a column of D), like A. The ring has B's scales beside A's; no scale is kept for a whole
// tile. by_row.cuh and by_row_kept.cuh share this code; by_slot.cuh and by_chunk.cuh keep no scales for a tile either.
#pragma once
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ring.cuh"
#include "scales/thread.cuh"

using FirstScales = float[1];

struct TileScales {
  DEVICE TileScales(const float*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) {}
  DEVICE void ask(uint32_t, FirstScales&) const {}
  DEVICE void start(const FirstScales&) {}
  DEVICE void advance(uint32_t) {}
};

// Shared by runs of k-blocks: they use no scales of a whole tile, and each kind defines its own loads.
struct RunScalesOfRows {
  const ThreadScales in_first_slot;  // by value: with a reference ptxas makes a loop that takes 3% longer

  DEVICE RunScalesOfRows(const ThreadScales& in_first_slot_, const TileScales&) : in_first_slot(in_first_slot_) {}
  DEVICE void begin_k_block(uint32_t, uint32_t) {}
  DEVICE void load_ahead(uint32_t, uint32_t, uint32_t) {}
  DEVICE void load_behind(uint32_t, uint32_t, uint32_t) {}
};

// total = fma(partial, round(sfa * sfb), total), for one 64 x kUnitN unit. `scales_of_columns(column)` returns the
// scales of the thread's two columns among the 8 from `column` on. Returns the last scale.
template <typename Scales>
DEVICE float promote_by_row(float (&total)[kUnitN / 2], const float (&partial)[kUnitN / 2], const float (&sfa)[2],
                            const Scales& scales_of_columns) {
  float last = 0;
#pragma unroll
  for (uint32_t column = 0; column < kUnitN; column += 8) {
    const ptx::Float2 scale = scales_of_columns(column);
    const uint32_t i = column / 2;
    total[i] = ptx::fma(partial[i], sfa[0] * scale.x, total[i]);
    total[i + 1] = ptx::fma(partial[i + 1], sfa[0] * scale.y, total[i + 1]);
    total[i + 2] = ptx::fma(partial[i + 2], sfa[1] * scale.x, total[i + 2]);
    total[i + 3] = ptx::fma(partial[i + 3], sfa[1] * scale.y, total[i + 3]);
    last = scale.y;
  }
  return last;
}
