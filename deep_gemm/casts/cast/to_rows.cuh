// Stores each row's values and scales to the same row of the outputs.
#pragma once

struct Targets {
  DEVICE Targets(const CastParams&, const Unit&, uint32_t) {}

  DEVICE void store(const CastParams& p, const Unit& unit, uint32_t i, uint32_t block, uint32_t lane,
                    const Values& values) const {
    const uint32_t row = unit.row + i;
    if (row < unit.end) store_values(p.values + uint64_t{row} * p.values_pitch, block * kBlock, p.k, lane, values);
  }

  // Lane i has the scale of row i.
  DEVICE void store_scales(const CastParams& p, const Unit& unit, uint32_t block, uint32_t lane, float scale) const {
    const uint32_t row = unit.row + lane;
    if (lane < kRows && row < unit.end) store_scale(p, row, unit.group, block, scale);
  }
};
