// A team casts one unit at a time: one block of columns of kRows rows. Each row of a block has a scale, or none has.
#pragma once

// Casts the unit and returns true. If kIsOrdinary and a block is not ordinary, writes nothing and returns false.
template <bool kIsOrdinary>
DEVICE bool cast_unit(const CastParams& p, const Unit& unit, const Targets& targets, uint32_t block, uint32_t lane,
                      const Held (&held)[kRows]) {
  // Each lane computes the scale of one row.
  uint32_t keys[kRows];
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) keys[i] = key_of<kIsOrdinary>(held[i]);
  const float amax = amax_of(largest_of_team(keys, lane));
  const Divisor of_lane = divisor_of<kIsOrdinary>(amax, p.min_amax, p.rounds_up, kLargestValue);
  if (kIsOrdinary && !ptx::all_sync(is_ordinary(of_lane))) return false;

  const uint32_t first_of_team = ptx::lane_index() / kLanes * kLanes;
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    Divisor divisor = of_lane;
    if constexpr (kRows > 1)
      divisor = {ptx::shfl_sync(of_lane.scale, first_of_team + i), ptx::shfl_sync(of_lane.reciprocal, first_of_team + i)};
    float quotients[kElements];
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e) quotients[e] = quotient_of<kIsOrdinary>(element_of(held[i], e), divisor);
    targets.store(p, unit, i, block, lane, pack_values(quotients));
  }
  float scale = of_lane.scale;
  if constexpr (kMarksBlocks && !kIsOrdinary) {
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) keys[i] = key_of<true>(held[i]);
    if (ptx::bits_of(amax_of(largest_of_team(keys, lane))) >= kInfinity) scale = ptx::float_of(kNan);
  }
  targets.store_scales(p, unit, block, lane, scale);
  return true;
}

DEVICE void store_unscaled(const CastParams& p, const Unit& unit, const Targets& targets, uint32_t block, uint32_t lane,
                           const Held (&held)[kRows]) {
#pragma unroll
  for (uint32_t i = 0; i < kRows; ++i) {
    float elements[kElements];
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e) elements[e] = element_of(held[i], e);
    targets.store(p, unit, i, block, lane, pack_values(elements));
  }
}

struct Team {
  DEVICE explicit Team(const CastParams&) {}

  DEVICE void cast(const CastParams& p, const Unit& unit, uint32_t block, uint32_t lane) const {
    const Targets targets(p, unit, lane);
    Loaded loaded[kRows];
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) loaded[i] = load(p, unit.row + i, unit.row + i < unit.end, block, lane);
    ptx::griddepcontrol_launch_dependents();  // the next kernel may start now and run up to its own wait
    Held held[kRows];
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) held[i] = held_of(p, loaded[i]);
    if constexpr (!kHasScales)
      store_unscaled(p, unit, targets, block, lane, held);
    else if (__builtin_expect(!cast_unit<true>(p, unit, targets, block, lane, held), 0))
      cast_unit<false>(p, unit, targets, block, lane, held);
  }
};
