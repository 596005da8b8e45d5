// Turns accumulators into silu(gate) * up in BF16. A unit has kGateColumns columns of gate, then as many of up
// (work/rows_of_layer_params.cuh says which rows of B), so a thread has gate and up of a column. Both are rounded to
// BF16, as in a BF16 product, and the activation replaces the gate. Panels are stored as usual; they are half as many.
//
// The result equals that of cast/source_silu.cuh for the same gate and up. Rows have no weights here.
#pragma once
#include "cast/silu.cuh"
#include "epilogue/store.cuh"

static_assert(kUnitN == 2 * kGateColumns, "a unit has gate and up of the same columns");

struct Output : PanelOutput {
  using PanelOutput::PanelOutput;

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const Tile& tile, float (&total)[kUnits][kUnitN / 2]) {
    const float limit = p.activation.limit;
    const auto activation = [&](float gate, float up) { return ptx::mul_rn(silu(ptx::min_nan(gate, limit)), ptx::min_magnitude(up, limit)); };
#pragma unroll
    for (auto& unit : total)
#pragma unroll
      for (uint32_t i = 0; i < kGateColumns / 2; i += 2) {
        const uint32_t up = kGateColumns / 2 + i;
        const ptx::Float2 gates = ptx::unpack_bf16(ptx::pack_bf16(unit[i], unit[i + 1]));
        const ptx::Float2 ups = ptx::unpack_bf16(ptx::pack_bf16(unit[up], unit[up + 1]));
        unit[i] = activation(gates.x, ups.x), unit[i + 1] = activation(gates.y, ups.y);
      }
    PanelOutput::store_tile(p, tile, total);
  }
};
