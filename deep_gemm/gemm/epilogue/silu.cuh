// Turns accumulators into A of the next product: silu(gate) * up, times the row's weight, cast to FP8 with a scale for
// each row and kColumns of these columns. GATES names the file that says where gate and up of a column are.
//
// The four threads of a row tell each other its largest magnitude, and exchange words until each has 16 contiguous
// bytes, which it stores from registers; rows of other groups are left out.
//
// Values and scales equal those of cast/source_silu.cuh's activation, cast by per_token_cast_to_fp8.
#pragma once
#include "cast/division.cuh"
#include "config.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"
#include "tile.cuh"
#include GATES
#include WORK

// kColumns activations of a row share a scale, and are in kUnitsOfScale units. Activated is a thread's part of them.
static_assert(requires(const Totals& total, uint32_t unit, uint32_t half, float limit, float weight, Activated& activated) {
  activate(total, unit, half, limit, weight, activated);  // of one of the thread's two rows
  activated[kColumns / 4 * kUnitsOfScale - 1];
}, "GATES");

struct OutputStorage {};

struct OutputBarriers {
  DEVICE void init() {}
};

DEVICE void prefetch_output_map(const Params&) {}
DEVICE void prefetch_d(const Params&, const TileToLoad&, uint32_t, uint32_t) {}

constexpr uint32_t kOfThread = kColumns / 4;

// The largest magnitude of the row. NaN does not count; an infinity counts only if kIsOrdinary.
template <bool kIsOrdinary>
DEVICE float amax_of(const Activated& activated) {
  float amax = 0;
#pragma unroll
  for (float x : activated) {
    const float magnitude = ptx::abs_f32(x);
    amax = ptx::max_f32(amax, kIsOrdinary || ptx::bits_of(magnitude) < 0x7f800000 ? magnitude : 0.f);
  }
  amax = ptx::max_f32(amax, ptx::shfl_xor_sync(amax, 1));
  return ptx::max_f32(amax, ptx::shfl_xor_sync(amax, 2));
}

// words[part][i] holds activated[16 * part + 4 * i] and the next three values, in FP8. A part is 64 columns.
struct CastRow {
  Divisor divisor;
  uint32_t words[kColumns / 64][4];
};

template <bool kIsOrdinary>
DEVICE void cast(const Activated& activated, CastRow& row) {
  row.divisor = divisor_of<kIsOrdinary>(amax_of<kIsOrdinary>(activated), 0.f, false);
  const auto quotient = [&](uint32_t i) { return quotient_of<kIsOrdinary>(activated[i], row.divisor); };
#pragma unroll
  for (uint32_t i = 0; i < kOfThread; i += 4)
    row.words[i / 16][i / 4 % 4] = pack_quotients(quotient(i), quotient(i + 1), quotient(i + 2), quotient(i + 3));
}

// Word i of lane j of four becomes word j of lane i.
DEVICE void transpose(uint32_t (&words)[4], uint32_t lane) {
#pragma unroll
  for (uint32_t distance = 1; distance < 4; distance *= 2) {
    const bool is_second = (lane & distance) != 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t &first = words[i], &second = words[i + distance];
      const uint32_t received = ptx::shfl_sync(is_second ? first : second, lane ^ distance);
      first = is_second ? received : first, second = is_second ? second : received;
    }
  }
}

// Stores a warpgroup's tiles.
struct Output {
  uint32_t warpgroup;

  DEVICE Output(OutputStorage&, OutputBarriers&, uint32_t warpgroup_) : warpgroup(warpgroup_) {}

  DEVICE void expect(const Params&, const Tile&) {}

  template <uint32_t kUnits>
  DEVICE void store_tile(const Params& p, const Tile& tile, float (&total)[kUnits][kUnitN / 2]) {
    const uint32_t first_row = tile.row_m + warpgroup * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4;
#pragma unroll
    for (uint32_t unit = 0; unit < kUnits; unit += kUnitsOfScale)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half)
        store_row(p.activation, p.d, p.d_pitch, total, unit, half, first_row + row_of_unit(unit) + half * 8, tile.end_m,
                  (tile.row_n + column_of_unit(unit)) / 2);
  }

  // Stores a row of every four lanes. All lanes take part, even if their row is not in the group.
  template <uint32_t kUnits>
  DEVICE void store_row(const Activation& a, uint8_t* d, uint64_t pitch, const float (&total)[kUnits][kUnitN / 2],
                        uint32_t unit, uint32_t half, uint32_t row, uint32_t end_row, uint32_t column) const {
    const uint32_t lane = ptx::lane_index();
    const bool is_there = row < end_row;
    const float weight = a.row_weights != nullptr && is_there ? ptx::ld_global_f32(a.row_weights + row) : 1.f;
    Activated activated;
    activate(total, unit, half, a.limit, weight, activated);
    CastRow cast_row;
    cast<true>(activated, cast_row);
    if (!ptx::all_sync(!is_there || is_ordinary(cast_row.divisor))) cast<false>(activated, cast_row);
    // The lower half of word j has lane j's two columns of 8, the upper half its two of the next 8.
    const auto lower = [](uint32_t x, uint32_t y) { return (x & 0xffff) | y << 16; };
    const auto upper = [](uint32_t x, uint32_t y) { return x >> 16 | (y & 0xffff0000); };
#pragma unroll
    for (uint32_t part = 0; part < kColumns / 64; ++part) {
      uint32_t(&words)[4] = cast_row.words[part];
      transpose(words, lane);
      if (!is_there) continue;
      ptx::st_global_v4_b32(d + row * pitch + column + part * 64 + lane % 4 * 16, lower(words[0], words[1]),
                            lower(words[2], words[3]), upper(words[0], words[1]), upper(words[2], words[3]));
    }
    if (!is_there) return;
    if (lane % 4 == 0)
      ptx::st_global_f32(a.scales + uint64_t{column / kColumns} * a.scales_pitch + row, cast_row.divisor.scale);
  }

  DEVICE void finish() {}
};

DEVICE void leave() {}
