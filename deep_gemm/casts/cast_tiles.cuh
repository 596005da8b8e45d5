// FP8 values whose scales cover rows and columns of 128x128 tiles of x [m, k]: what needs a whole tile at once.
//
//   kCastsRows      values [m, k], a scale for each row and 128 columns
//   kCastsColumns   the transposed values [k, m], a scale for each column and 128 rows: alone, or beside those of rows
//   kCastsChannels  values [m, k], a scale for each column and 128 rows
//   kCastsBlocks    values [m, k], a scale for each 128x128 block
//
// A CTA takes a tile, and all of its loads are under way before it looks at the first. A team of lanes holds kTeamRows rows
// that follow each other, so that a thread has as many bytes of each of its columns that lie beside each other in the
// transposed output. Those go through shared memory, and from there 128 at once to each column's place.
#pragma once
#include "cast/fp8.cuh"

struct TileCastParams {
  const uint8_t* x;
  uint8_t *values, *columns;
  uint8_t *scales, *column_scales;
  // Pitches in bytes: row to row of x, of values and of columns, whose rows are columns of x; scales by row or column, by
  // block of 128. 32 bits, so that an address is one instruction.
  uint32_t x_pitch, values_pitch, columns_pitch;
  uint32_t scales_stride_m, scales_stride_k, column_scales_stride_m, column_scales_stride_k;
  uint32_t m, k;
  uint32_t block_reciprocal;  // of ceil(k / 128): see BlockOfRows
  float min_amax;       // the largest magnitude under a scale counts as at least this
  uint32_t rounds_up;  // scales are powers of two
};
#include "tile_cast_params_layout.cuh"  // asserts that it lies as core/params.py packs it

constexpr bool kCastsColumns = kColumnBytes != 0;
constexpr bool kNeedsColumns = kCastsColumns || kCastsChannels;
constexpr uint32_t kTeamRows = kBlock / kTeams;
constexpr uint32_t kNumWarps = kNumThreads / 32;
static_assert(kTeamRows == 8 || kTeamRows == 16, "a thread's bytes of a column are one or two chunks of 8");
static_assert(kNumThreads == 2 * kBlock, "half of the threads take a column each, the other half a row");

struct SharedStorage {
  // Bytes of columns: chunks of kTeamRows, whose places are exchanged so that a warp's accesses meet different banks.
  alignas(16) uint8_t columns[kCastsColumns ? kBlock : 1][kBlock];
  uint32_t column_keys[kNeedsColumns ? kTeams : 1][kWords * kLanes];
  Divisor of_rows[kBlock];
  Divisor of_columns[kElements][kLanes];  // those that a team reads at once lie beside each other
  uint32_t warp_keys[kNumWarps];
};
static_assert(sizeof(SharedStorage) == kSharedBytes, "TileCastConfig.shared_bytes and SharedStorage differ");

// The tile of a CTA, and what a thread has of it.
struct Tile {
  uint32_t row, column;  // the first
  uint32_t team, lane;
  Piece pieces[kTeamRows];

  DEVICE Tile(const TileCastParams& p) : team(ptx::thread_index() / kLanes), lane(ptx::thread_index() % kLanes) {
    const BlockOfRows tile(ptx::block_index(), ceil_div(p.k, kBlock), p.block_reciprocal);
    row = tile.row * kBlock, column = tile.block * kBlock;
  }

  DEVICE uint32_t row_of(uint32_t i) const { return team * kTeamRows + i; }  // counted from the tile's first

  DEVICE void load(const TileCastParams& p) {
#pragma unroll
    for (uint32_t i = 0; i < kTeamRows; ++i) {
      const uint32_t x_row = row + row_of(i);
      pieces[i] = load_piece(p.x + uint64_t{x_row} * p.x_pitch, x_row < p.m, column, p.k, lane);
    }
  }
};

// ---- Scales

// The lane of a team that has a column, and as which of its elements.
DEVICE uint32_t lane_of(uint32_t column) { return kVector == 1 ? column % kLanes : column / kVector; }
DEVICE uint32_t index_of(uint32_t column) { return kVector == 1 ? column / kLanes : column % kVector; }

// Where the key of a lane's word is among those of its team.
DEVICE uint32_t place_of_key(uint32_t lane, uint32_t word) {
  return kVector == 1 ? word * kLanes + lane : lane * kWords + word;
}

// The largest of each column among a team's rows.
template <bool kIsOrdinary>
DEVICE void store_column_keys(SharedStorage& shared, const Tile& tile) {
  uint32_t keys[kWords];
#pragma unroll
  for (uint32_t word = 0; word < kWords; ++word) {
    keys[word] = 0;
#pragma unroll
    for (const Piece& piece : tile.pieces) keys[word] = larger_key(keys[word], key_of<kIsOrdinary>(piece.words[word]));
    if constexpr (kVector == 1)
      ptx::st_shared_b32(&shared.column_keys[tile.team][place_of_key(tile.lane, word)], keys[word]);
  }
  if constexpr (kVector > 1)
    ptx::st_shared_v4_b32(&shared.column_keys[tile.team][place_of_key(tile.lane, 0)], keys[0], keys[1], keys[2], keys[3]);
}

// A column's, of all teams' keys.
DEVICE float amax_of_column(const SharedStorage& shared, uint32_t column) {
  const uint32_t element = index_of(column), place = place_of_key(lane_of(column), element / kElementsOfWord);
  uint32_t key = 0;
#pragma unroll
  for (uint32_t team = 0; team < kTeams; ++team) key = larger_key(key, ptx::ld_shared_b32(&shared.column_keys[team][place]));
  const ptx::Float2 amaxes = amaxes_of(key);
  return element % kElementsOfWord == 0 ? amaxes.x : amaxes.y;
}

// A lane has the scale of one of its team's rows. Tells whether it is ordinary.
template <bool kIsOrdinary>
DEVICE bool store_row_divisors(SharedStorage& shared, const TileCastParams& p, const Tile& tile) {
  uint32_t keys[kTeamRows];
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) keys[i] = key_of<kIsOrdinary>(tile.pieces[i]);
  const float amax = amax_of(largest_of_team(keys, tile.lane));
  const Divisor divisor = divisor_of<kIsOrdinary>(amax, p.min_amax, p.rounds_up);
  if (tile.lane < kTeamRows) store_divisor(&shared.of_rows[tile.row_of(tile.lane)], divisor);
  return is_ordinary(divisor);
}

// The largest of a warp's elements.
template <bool kIsOrdinary>
DEVICE void store_warp_key(SharedStorage& shared, const Tile& tile) {
  uint32_t key = 0;
#pragma unroll
  for (const Piece& piece : tile.pieces) key = larger_key(key, key_of<kIsOrdinary>(piece));
#pragma unroll
  for (uint32_t distance = 1; distance < 32; distance *= 2)
    key = larger_key(key, ptx::shfl_sync(key, ptx::lane_index() ^ distance));
  if (ptx::lane_index() == 0) ptx::st_shared_b32(&shared.warp_keys[ptx::thread_index() / 32], key);
}

DEVICE float amax_of_tile(const SharedStorage& shared) {
  uint32_t key = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kNumWarps; ++warp) key = larger_key(key, ptx::ld_shared_b32(&shared.warp_keys[warp]));
  return amax_of(key);
}

// ---- Values

// `divisor(i, element)` is that of a thread's row and element.
template <bool kIsOrdinary, typename DivisorOf>
DEVICE void store_tile(const TileCastParams& p, const Tile& tile, DivisorOf divisor) {
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) {
    const uint32_t row = tile.row + tile.row_of(i);
    float quotients[kElements];
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e)
      quotients[e] = quotient_of<kIsOrdinary>(element_of(tile.pieces[i], e), divisor(i, e));
    if (row < p.m) store_values(p.values + uint64_t{row} * p.values_pitch, tile.column, p.k, tile.lane, pack_values(quotients));
  }
}

// Where a column's bytes of a team's rows are. The lanes of a team, whose columns are kVector apart, have different places.
DEVICE uint32_t swizzle_of(uint32_t column) { return column / kVector % kTeams; }

template <bool kIsOrdinary>
DEVICE void transpose(SharedStorage& shared, const Tile& tile) {
#pragma unroll
  for (uint32_t e = 0; e < kElements; ++e) {
    const uint32_t column = column_of(tile.lane, e);
    const Divisor divisor = load_divisor(&shared.of_columns[e][tile.lane]);
    uint32_t words[kTeamRows / 4];
#pragma unroll
    for (uint32_t i = 0; i < kTeamRows; i += 4) {
      float quotients[4];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) quotients[j] = quotient_of<kIsOrdinary>(element_of(tile.pieces[i + j], e), divisor);
      words[i / 4] = pack_quotients(quotients[0], quotients[1], quotients[2], quotients[3]);
    }
    uint8_t* chunk = &shared.columns[column][(tile.team ^ swizzle_of(column)) * kTeamRows];
    if constexpr (kTeamRows == 8)
      ptx::st_shared_v2_b32(chunk, words[0], words[1]);
    else
      ptx::st_shared_v4_b32(chunk, words[0], words[1], words[2], words[3]);
  }
}

// 16 bytes of a column, from row 16 * i of the tile on. Two chunks of 8 lie beside each other, and may be exchanged.
DEVICE ptx::Uint4 load_16_of_column(const SharedStorage& shared, uint32_t column, uint32_t i) {
  const uint32_t swizzle = swizzle_of(column);
  if constexpr (kTeamRows == 16) return ptx::ld_shared_v4_b32(&shared.columns[column][(i ^ swizzle) * 16]);
  const ptx::Uint4 v = ptx::ld_shared_v4_b32(&shared.columns[column][(i ^ swizzle / 2) * 16]);
  return swizzle % 2 == 0 ? v : ptx::Uint4{v.z, v.w, v.x, v.y};
}

DEVICE uint32_t load_byte_of_column(const SharedStorage& shared, uint32_t column, uint32_t row) {
  const uint8_t* chunk = &shared.columns[column][(row / kTeamRows ^ swizzle_of(column)) * kTeamRows];
  return ptx::ld_shared_b32(chunk + row % kTeamRows / 4 * 4) >> row % 4 * 8;
}

DEVICE void store_columns(const SharedStorage& shared, const TileCastParams& p, const Tile& tile) {
  constexpr uint32_t kChunks = kBlock / (kCastsColumns ? kColumnBytes : 1);
#pragma unroll 1
  for (uint32_t i = ptx::thread_index(); i < kBlock * kChunks; i += kNumThreads) {
    const uint32_t column = i / kChunks, row = i % kChunks * kColumnBytes;
    if (tile.column + column >= p.k || tile.row + row >= p.m) continue;
    uint8_t* to = p.columns + uint64_t{tile.column + column} * p.columns_pitch + tile.row + row;
    if constexpr (kColumnBytes == 16) {
      const ptx::Uint4 v = load_16_of_column(shared, column, row / 16);
      ptx::st_global_v4_b32(to, v.x, v.y, v.z, v.w);
    } else {
      ptx::st_global_b8(to, load_byte_of_column(shared, column, row));
    }
  }
}

// Tells whether it has cast the tile. It writes nothing if it takes the tile for ordinary, which it is not.
template <bool kIsOrdinary>
DEVICE bool cast_tile(SharedStorage& shared, const TileCastParams& p, const Tile& tile) {
  const uint32_t thread = ptx::thread_index(), block_m = tile.row / kBlock, block_k = tile.column / kBlock;
  bool all_ordinary = true;  // this thread's scales
  if constexpr (kNeedsColumns) store_column_keys<kIsOrdinary>(shared, tile);
  if constexpr (kCastsRows) all_ordinary = store_row_divisors<kIsOrdinary>(shared, p, tile);
  if constexpr (kCastsBlocks) store_warp_key<kIsOrdinary>(shared, tile);
  ptx::syncthreads();

  if constexpr (kCastsBlocks) {
    const Divisor divisor = divisor_of<kIsOrdinary>(amax_of_tile(shared), p.min_amax, p.rounds_up);
    if (kIsOrdinary && !is_ordinary(divisor)) return false;
    if (thread == 0) ptx::st_global_f32(scale_at(p.scales, block_m, p.scales_stride_m, block_k, p.scales_stride_k), divisor.scale);
    store_tile<kIsOrdinary>(p, tile, [&](uint32_t, uint32_t) { return divisor; });
  }
  Divisor of_column = {};
  if (kNeedsColumns && thread < kBlock) {
    of_column = divisor_of<kIsOrdinary>(amax_of_column(shared, thread), p.min_amax, p.rounds_up);
    store_divisor(&shared.of_columns[index_of(thread)][lane_of(thread)], of_column);
    all_ordinary = all_ordinary && is_ordinary(of_column);
  }
  if (!kCastsBlocks && !ptx::syncthreads_and(all_ordinary) && kIsOrdinary) return false;

  if constexpr (kNeedsColumns) {
    const uint32_t column = tile.column + thread;
    uint8_t* scale = kCastsChannels
                         ? scale_at(p.scales, block_m, p.scales_stride_m, column, p.scales_stride_k)
                         : scale_at(p.column_scales, block_m, p.column_scales_stride_m, column, p.column_scales_stride_k);
    if (thread < kBlock && column < p.k) ptx::st_global_f32(scale, of_column.scale);
  }
  if constexpr (kCastsRows) {
    const uint32_t row = thread - kBlock;
    if (thread >= kBlock && tile.row + row < p.m)
      ptx::st_global_f32(scale_at(p.scales, tile.row + row, p.scales_stride_m, block_k, p.scales_stride_k),
                         load_divisor(&shared.of_rows[row]).scale);
    store_tile<kIsOrdinary>(p, tile, [&](uint32_t i, uint32_t) { return load_divisor(&shared.of_rows[tile.row_of(i)]); });
  }
  if constexpr (kCastsChannels) {
    Divisor divisors[kElements];
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e) divisors[e] = load_divisor(&shared.of_columns[e][tile.lane]);
    store_tile<kIsOrdinary>(p, tile, [&](uint32_t, uint32_t e) { return divisors[e]; });
  }
  if constexpr (kCastsColumns) {
    transpose<kIsOrdinary>(shared, tile);
    ptx::syncthreads();
    store_columns(shared, p, tile);
  }
  return true;
}

KERNEL(kNumThreads, kCtasPerSm) cast_tiles(GRID_CONSTANT TileCastParams p) {
  SharedStorage& shared = ptx::dynamic_shared<SharedStorage>();
  Tile tile(p);
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();  // the next kernel may come as far as its own wait
  tile.load(p);
  if (__builtin_expect(!cast_tile<true>(shared, p, tile), 0)) {
    ptx::syncthreads();  // the keys have been read
    cast_tile<false>(shared, p, tile);
  }
}
