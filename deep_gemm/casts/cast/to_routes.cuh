// Stores each row's values and scales to the rows of its routes: a token is read and cast once for all its experts.
#pragma once

struct Targets {
  int32_t routes[kRows];  // in lane j of a warp: the target row of route j, for each row

  DEVICE Targets(const CastParams& p, const Unit& unit, uint32_t lane) {
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) routes[i] = route_of(p, unit, i, lane % kLanesOfWarp);
  }

  DEVICE static int32_t route_of(const CastParams& p, const Unit& unit, uint32_t i, uint32_t j) {
    const uint32_t row = unit.row + i;
    return row < unit.end && j < p.topk ? ptx::ld_global_i32(p.row_of + uint64_t{row} * p.topk + j) : -1;
  }

  // The first routes are in registers. If a row has more routes than a team has lanes, the rest are loaded.
  DEVICE int32_t route(const CastParams& p, const Unit& unit, uint32_t i, uint32_t first, uint32_t lane) const {
    return first == 0 ? routes[i] : route_of(p, unit, i, first + lane % kLanesOfWarp);
  }

  DEVICE void store(const CastParams& p, const Unit& unit, uint32_t i, uint32_t block, uint32_t lane,
                    const Values& values) const {
    const uint32_t first_of_team = ptx::lane_index() / kLanes * kLanes;
#pragma unroll 1
    for (uint32_t first = 0; first < p.topk; first += kLanesOfWarp) {
      const int32_t of_lane = route(p, unit, i, first, lane);
      const uint32_t count = p.topk - first < kLanesOfWarp ? p.topk - first : kLanesOfWarp;
#pragma unroll 1
      for (uint32_t four = 0; four < count; four += 4) {
#pragma unroll
        for (uint32_t j = four; j < four + 4; ++j) {  // lanes behind the last route hold -1
          const int32_t to = ptx::shfl_sync(static_cast<uint32_t>(of_lane), first_of_team + j);
          if (to >= 0) store_values(p.values + static_cast<uint64_t>(to) * p.values_pitch, block * kBlock, p.k, lane, values);
        }
      }
    }
  }

  // Lane i has the scale of row i.
  DEVICE void store_scales(const CastParams& p, const Unit& unit, uint32_t block, uint32_t lane, float of_lane) const {
    const uint32_t first_of_team = ptx::lane_index() / kLanes * kLanes;
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
      const float scale = ptx::shfl_sync(of_lane, first_of_team + i);
#pragma unroll 1
      for (uint32_t first = 0; first < p.topk; first += kLanesOfWarp) {
        const int32_t to = route(p, unit, i, first, lane);
        if (to >= 0) store_scale(p, to, 0, block, scale);
      }
    }
  }
};
