// All rows of a matrix. The host launches as many CTAs as the rows need.
#pragma once

struct Rows {
  static constexpr bool kIsShared = kFindsAmax;  // whether each CTA casts several units
  uint32_t m, num_units;

  DEVICE explicit Rows(const CastParams& p) : m(p.m), num_units(ceil_div(p.m, kRows)) {}

  DEVICE Unit unit(uint32_t i) const { return i < num_units ? Unit{i * kRows, m, 0} : Unit{0, 0, 0}; }
};
