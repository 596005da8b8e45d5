// A team handles a whole row at a time. It casts the row with the row's own scale or a given scale (kIsGiven), or only
// finds the largest magnitude of its rows (kFindsAmax). A lane keeps kPieces pieces, and loads the rest at each use.
#pragma once

// x / scale for any x and scale. Quotients too large for FP8 are later stored as 448. An infinite x becomes NaN.
DEVICE float quotient_by_given(float x, Divisor d) {
  if (!is_ordinary(d) || d.scale > 0x1p90f)
    return ptx::abs_f32(x) < ptx::float_of(kInfinity) ? x / d.scale : ptx::float_of(kNan);
  // Like quotient_of, but `guess` is clamped, so that the step cannot overflow. Infinity times zero adds a NaN.
  const float guess = ptx::min_magnitude(x * -d.reciprocal, 0x1p12f);
  const float excess = ptx::fma_rn(x, 0.f, ptx::fma_rn(guess, d.scale, -x));
  return ptx::fma_rn(excess, d.reciprocal, guess);
}

// Returns the team's largest key to all its lanes. Warps exchange keys through the last words of shared memory.
DEVICE uint32_t largest_of_row(uint32_t (&keys)[1], uint32_t lane) {
  uint32_t key = largest_of_team(keys, lane);
  if constexpr (kLanes > 32) {
    uint32_t* of_warps = &ptx::dynamic_shared<uint32_t>() + (kSharedBytes / 4 - kLanes / 32);
    if (lane % 32 == 0) ptx::st_shared_b32(of_warps + lane / 32, key);
    ptx::syncthreads();
#pragma unroll
    for (uint32_t warp = 0; warp < kLanes / 32; ++warp) key = larger_key(key, ptx::ld_shared_b32(of_warps + warp));
    ptx::syncthreads();  // the keys have been read: the next row's may overwrite them
  }
  return key;
}

struct Team {
  float number;  // the given scale, or the largest magnitude of the team's earlier rows

  DEVICE explicit Team(const CastParams& p) : number(kIsGiven ? ptx::ld_global_f32(p.scales) : 0.f) {}

  DEVICE void cast(const CastParams& p, const Unit& unit, uint32_t, uint32_t lane) {
    const Targets targets(p, unit, lane);
    const auto piece = [&](uint32_t i) { return load(p, unit.row, unit.row < unit.end, i, lane); };
    Loaded loaded[kPieces];
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) loaded[i] = piece(i);
    ptx::griddepcontrol_launch_dependents();
    Held held[kPieces];
#pragma unroll
    for (uint32_t i = 0; i < kPieces; ++i) held[i] = held_of(p, loaded[i]);

    const auto each_piece = [&](auto use) {
#pragma unroll
      for (uint32_t i = 0; i < kPieces; ++i)
        if (i * kBlock < p.k) use(i, held[i]);
#pragma unroll 1
      for (uint32_t i = kPieces; i * kBlock < p.k; ++i) use(i, held_of(p, piece(i)));
    };
    const auto store = [&](auto quotient) {
      each_piece([&](uint32_t i, const Held& piece) {
        float quotients[kElements];
#pragma unroll
        for (uint32_t e = 0; e < kElements; ++e) quotients[e] = quotient(element_of(piece, e));
        targets.store(p, unit, 0, i, lane, pack_values(quotients));
      });
    };
    const Divisor given = {number, -reciprocal_of(number)};
    if constexpr (kIsGiven) return store([&](float x) { return quotient_by_given(x, given); });

    uint32_t keys[] = {0};
    each_piece([&](uint32_t, const Held& piece) { keys[0] = larger_key(keys[0], key_of<false>(piece)); });
    const float amax = amax_of(largest_of_row(keys, lane));
    if constexpr (kFindsAmax) {
      number = ptx::max_f32(number, amax);
      if (lane == 0) ptx::st_global_f32(p.scales + (ptx::block_index() * kTeams + ptx::thread_index() / kLanes) * 4, number);
      return;
    }
    const Divisor ordinary = divisor_of<true>(amax, p.min_amax, p.rounds_up);
    const Divisor any = divisor_of<false>(amax, p.min_amax, p.rounds_up);
    if (is_ordinary(ordinary))
      store([&](float x) { return quotient_of<true>(x, ordinary); });
    else
      store([&](float x) { return quotient_of<false>(x, any); });
    if (lane < 32) targets.store_scales(p, unit, 0, lane, any.scale);
  }
};
