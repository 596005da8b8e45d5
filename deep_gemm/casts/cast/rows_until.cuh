// The rows of a matrix up to the end of its last group, which only the GPU knows. CTAs split the units of these rows.
#pragma once

struct Rows {
  static constexpr bool kIsShared = true;
  uint32_t end, num_units;

  DEVICE explicit Rows(const CastParams& p) {
    const int32_t last = ptx::ld_global_i32(p.sizes + p.num_groups - 1);
    const uint32_t some = last < 0 ? 0 : last;
    end = some < p.m ? some : p.m;
    num_units = ceil_div(end, kRows);
  }

  DEVICE Unit unit(uint32_t i) const { return i < num_units ? Unit{i * kRows, end, 0} : Unit{0, 0, 0}; }
};
