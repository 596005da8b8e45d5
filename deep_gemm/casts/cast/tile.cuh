// Casts a 128x128 tile to FP8, if scales or transposed values need the whole tile at once. Each thread of a CTA holds
// some of the tile's elements.
//
//   kCastsRows      values [m, k], a scale for each row and 128 columns
//   kCastsColumns   transposed values [k, m], a scale for each column and 128 rows; kCastsRows may be set too
//   kCastsChannels  values [m, k], a scale for each column and 128 rows
//   kCastsBlocks    values [m, k], a scale for each 128x128 block; with kCastsColumns, transposed values, and values
//                   [m, k] only if `values` is not null
//
// Except for rows, kScaleBlock may be 32 or 64 instead of 128. Then a tile has several scales for a column, or blocks.
//
// A team of lanes holds kTeamRows successive rows. So a thread has kTeamRows bytes of each of its columns, which are
// adjacent in the transposed output. Shared memory collects 128 bytes of a column for the store.
#pragma once
#include "cast/fp8.cuh"

// The outputs of a tile, and for cast_tiles also the input.
struct TileCastParams {
  const uint8_t* x;
  uint8_t *values, *columns;
  uint8_t *scales, *column_scales;
  const float* column_amaxes;  // [k]: the least amax that a tile uses for a column; or nullptr
  // Pitches in bytes: from row to row of x, of values and of columns (a row of columns is a column of x); of scales by
  // row or column, and by block of 128. They have 32 bits, so that an address needs one instruction.
  uint32_t x_pitch, values_pitch, columns_pitch;
  uint32_t scales_stride_m, scales_stride_k, column_scales_stride_m, column_scales_stride_k;
  uint32_t m, k;
  uint32_t block_reciprocal;  // of ceil(k / 128): see BlockOfRows
  float min_amax;       // the largest magnitude under a scale is raised to at least this
  uint32_t rounds_up;  // scales are powers of two
};

constexpr bool kCastsColumns = kColumnBytes != 0;
constexpr bool kTurnsBlocks = kCastsBlocks && kCastsColumns;
constexpr bool kNeedsColumns = (kCastsColumns && !kCastsBlocks) || kCastsChannels;  // whether columns have scales
constexpr uint32_t kTeamRows = kBlock / kTeams;
constexpr uint32_t kNumWarps = kNumThreads / 32;
constexpr uint32_t kParts = kBlock / kScaleBlock;  // parts of a tile's rows, or columns, with separate scales
constexpr uint32_t kColumnScales = ceil_div(kBlock * kParts, kNumThreads);  // column scales that a thread computes
constexpr uint32_t kWarpsOfPart = kNumWarps / kParts;
// The number of blocks that hold a lane's elements, and the number of a team's lanes that have elements of one block.
constexpr uint32_t kBlocksOfLane = kVector == 1 ? kParts : 1;
constexpr uint32_t kLanesOfBlock = kVector == 1 ? kLanes : kScaleBlock / kVector;
static_assert(kTeamRows == 8 || kTeamRows == 16, "a thread's bytes of a column are one or two chunks of 8");
static_assert(kNumThreads == 2 * kBlock, "half of the threads take a column each, the other half a row");

struct TileStorage {
  // Bytes of columns, in pieces of kTeamRows. Pieces are swizzled, so that a warp accesses different banks.
  alignas(16) uint8_t columns[kCastsColumns ? kBlock : 1][kBlock];
  uint32_t column_keys[kNeedsColumns ? kTeams : 1][kWords * kLanes];
  Divisor of_rows[kBlock];
  // Divisors that a team reads at once are adjacent.
  Divisor of_columns[kNeedsColumns ? kParts : 1][kElements][kLanes];
  uint32_t warp_keys[kNumWarps][kParts];
};

// The tile of a CTA, with a thread's pieces of it.
struct Tile {
  uint32_t row, column;  // the first row and column
  uint32_t team, lane;
  Piece pieces[kTeamRows];

  DEVICE Tile(const BlockOfRows& tile) : team(ptx::thread_index() / kLanes), lane(ptx::thread_index() % kLanes) {
    row = tile.row * kBlock, column = tile.block * kBlock;
  }

  DEVICE uint32_t row_of(uint32_t i) const { return team * kTeamRows + i; }  // counted from the tile's first
  // The index of the part of the tile's rows that contains the team's rows.
  DEVICE uint32_t part() const { return kParts == 1 ? 0 : team * kTeamRows / kScaleBlock; }
};

// ---- Scales

// The lane of a team that holds a column, and the index of the column among the lane's elements.
DEVICE uint32_t lane_of(uint32_t column) { return kVector == 1 ? column % kLanes : column / kVector; }
DEVICE uint32_t index_of(uint32_t column) { return kVector == 1 ? column / kLanes : column % kVector; }

// The index of a lane's word among its team's `column_keys`.
DEVICE uint32_t place_of_key(uint32_t lane, uint32_t word) {
  return kVector == 1 ? word * kLanes + lane : lane * kWords + word;
}

// Stores each column's largest key in a team's rows.
template <bool kIsOrdinary>
DEVICE void store_column_keys(TileStorage& shared, const Tile& tile) {
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

// A scale of a column of a tile. The scales of one column have successive indices, so that a warp's stores fill whole
// sectors in either layout of scales.
struct ColumnScale {
  uint32_t index, column, part;
  DEVICE explicit ColumnScale(uint32_t i) : index(i), column(i / kParts), part(i % kParts) {}
  DEVICE bool is_there() const { return index < kBlock * kParts; }
};

// The largest magnitude of a column in a part of the rows, from the keys of the part's teams.
DEVICE float amax_of_column(const TileStorage& shared, uint32_t column, uint32_t part) {
  const uint32_t element = index_of(column), place = place_of_key(lane_of(column), element / kElementsOfWord);
  uint32_t key = 0;
#pragma unroll
  for (uint32_t i = 0; i < kTeams / kParts; ++i)
    key = larger_key(key, ptx::ld_shared_b32(&shared.column_keys[part * (kTeams / kParts) + i][place]));
  const ptx::Float2 amaxes = amaxes_of(key);
  return element % kElementsOfWord == 0 ? amaxes.x : amaxes.y;
}

template <bool kIsOrdinary>
DEVICE Divisor store_column_divisor(TileStorage& shared, const TileCastParams& p, const Tile& tile, const ColumnScale& at) {
  float least = p.min_amax;
  if (p.column_amaxes != nullptr && tile.column + at.column < p.k)
    least = ptx::max_f32(least, ptx::ld_global_f32(p.column_amaxes + tile.column + at.column));
  const Divisor divisor = divisor_of<kIsOrdinary>(amax_of_column(shared, at.column, at.part), least, p.rounds_up);
  store_divisor(&shared.of_columns[at.part][index_of(at.column)][lane_of(at.column)], divisor);
  return divisor;
}

DEVICE void store_column_scale(const TileCastParams& p, const Tile& tile, uint32_t block_m, const ColumnScale& at, float scale) {
  const uint32_t column = tile.column + at.column, part = block_m * kParts + at.part;
  uint8_t* to = kCastsChannels ? scale_at(p.scales, part, p.scales_stride_m, column, p.scales_stride_k)
                               : scale_at(p.column_scales, part, p.column_scales_stride_m, column, p.column_scales_stride_k);
  if (at.is_there() && column < p.k && (kParts == 1 || part * kScaleBlock < p.m)) ptx::st_global_f32(to, scale);
}

// Computes and stores divisors of rows, each lane for one row of its team. Tells whether this divisor is ordinary.
template <bool kIsOrdinary>
DEVICE bool store_row_divisors(TileStorage& shared, const TileCastParams& p, const Tile& tile) {
  uint32_t keys[kTeamRows];
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) keys[i] = key_of<kIsOrdinary>(tile.pieces[i]);
  const float amax = amax_of(largest_of_team(keys, tile.lane));
  const Divisor divisor = divisor_of<kIsOrdinary>(amax, p.min_amax, p.rounds_up);
  if (tile.lane < kTeamRows) store_divisor(&shared.of_rows[tile.row_of(tile.lane)], divisor);
  return is_ordinary(divisor);
}

// The key of a lane's elements in block `i` of its kBlocksOfLane blocks.
template <bool kIsOrdinary>
DEVICE uint32_t key_of_block(const Piece& piece, uint32_t i) {
  if constexpr (kBlocksOfLane == 1) return key_of<kIsOrdinary>(piece);
  constexpr uint32_t kEach = kElements / kBlocksOfLane;
  uint32_t key = 0;
#pragma unroll
  for (uint32_t e = i * kEach; e < (i + 1) * kEach; ++e) {
    const uint32_t of_word = key_of<kIsOrdinary>(piece.words[e / kElementsOfWord]);
    key = larger_key(key, kElementsOfWord == 1 ? of_word : of_word >> e % 2 * 16 & 0xffff);
  }
  return key;
}

// The index of a lane's block `i` among the tile's blocks of columns.
DEVICE uint32_t block_of(const Tile& tile, uint32_t i) {
  return kBlocksOfLane == kParts ? i : tile.lane / kLanesOfBlock;
}

// Tells whether this lane stores for all lanes of its warp with the same blocks. A warp's rows are in one part.
DEVICE bool is_first_of_block() {
  return kBlocksOfLane * kLanesOfBlock < kLanes ? ptx::lane_index() % kLanesOfBlock == 0 && ptx::lane_index() < kLanes
                                                : ptx::lane_index() == 0;
}

// Stores the largest key of a warp's elements in each block.
template <bool kIsOrdinary>
DEVICE void store_warp_keys(TileStorage& shared, const Tile& tile) {
#pragma unroll
  for (uint32_t i = 0; i < kBlocksOfLane; ++i) {
    uint32_t key = 0;
#pragma unroll
    for (const Piece& piece : tile.pieces) key = larger_key(key, key_of_block<kIsOrdinary>(piece, i));
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      if (distance < kLanesOfBlock || distance >= kLanes)  // another team has the same columns
        key = larger_key(key, ptx::shfl_sync(key, ptx::lane_index() ^ distance));
    }
    if (is_first_of_block()) ptx::st_shared_b32(&shared.warp_keys[ptx::thread_index() / 32][block_of(tile, i)], key);
  }
}

// The largest magnitude of a lane's block `i`, over all rows of the thread's part.
DEVICE float amax_of_block(const TileStorage& shared, const Tile& tile, uint32_t i) {
  uint32_t key = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kWarpsOfPart; ++warp)
    key = larger_key(key, ptx::ld_shared_b32(&shared.warp_keys[tile.part() * kWarpsOfPart + warp][block_of(tile, i)]));
  return amax_of(key);
}

// One thread stores each block's scale.
DEVICE void store_block_scales(const TileCastParams& p, const Tile& tile, const Divisor (&divisors)[kBlocksOfLane]) {
  if constexpr (kParts == 1) {
    if (ptx::thread_index() == 0)
      ptx::st_global_f32(scale_at(p.scales, tile.row / kBlock, p.scales_stride_m, tile.column / kBlock, p.scales_stride_k),
                         divisors[0].scale);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kBlocksOfLane; ++i) {
      const uint32_t row = tile.row / kScaleBlock + tile.part(), column = tile.column / kScaleBlock + block_of(tile, i);
      if (is_first_of_block() && ptx::thread_index() / 32 % kWarpsOfPart == 0 && row * kScaleBlock < p.m &&
          column * kScaleBlock < p.k)
        ptx::st_global_f32(scale_at(p.scales, row, p.scales_stride_m, column, p.scales_stride_k), divisors[i].scale);
    }
  }
}

// ---- Values

// Stores values [m, k]. `divisor(i, element)` returns the divisor of an element in the thread's row `i`.
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

// A team's bytes of a column are in piece `team ^ swizzle`, which differs between lanes (columns kVector apart).
DEVICE uint32_t swizzle_of(uint32_t column) { return column / kVector % kTeams; }

// Stores columns in shared memory. `divisor_of_element(e)` returns the divisor of a thread's elements `e` (a column).
template <bool kIsOrdinary, typename DivisorOf>
DEVICE void transpose(TileStorage& shared, const Tile& tile, DivisorOf divisor_of_element) {
#pragma unroll
  for (uint32_t e = 0; e < kElements; ++e) {
    const uint32_t column = column_of(tile.lane, e);
    const Divisor divisor = divisor_of_element(e);
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

// Loads 16 bytes of a column, from row 16 * i of the tile on. If the swizzle is odd, two pieces of 8 bytes are swapped.
DEVICE ptx::Uint4 load_16_of_column(const TileStorage& shared, uint32_t column, uint32_t i) {
  const uint32_t swizzle = swizzle_of(column);
  if constexpr (kTeamRows == 16) return ptx::ld_shared_v4_b32(&shared.columns[column][(i ^ swizzle) * 16]);
  const ptx::Uint4 v = ptx::ld_shared_v4_b32(&shared.columns[column][(i ^ swizzle / 2) * 16]);
  return swizzle % 2 == 0 ? v : ptx::Uint4{v.z, v.w, v.x, v.y};
}

DEVICE uint32_t load_byte_of_column(const TileStorage& shared, uint32_t column, uint32_t row) {
  const uint8_t* chunk = &shared.columns[column][(row / kTeamRows ^ swizzle_of(column)) * kTeamRows];
  return ptx::ld_shared_b32(chunk + row % kTeamRows / 4 * 4) >> row % 4 * 8;
}

DEVICE void store_columns(const TileStorage& shared, const TileCastParams& p, const Tile& tile) {
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

// Casts the tile and returns true. If kIsOrdinary and the tile is not ordinary, writes no output and returns false.
template <bool kIsOrdinary, bool kRowsToo>
DEVICE bool cast_tile(TileStorage& shared, const TileCastParams& p, const Tile& tile) {
  const uint32_t thread = ptx::thread_index(), block_m = tile.row / kBlock, block_k = tile.column / kBlock;
  bool all_ordinary = true;  // whether this thread's scales are ordinary
  if constexpr (kNeedsColumns) store_column_keys<kIsOrdinary>(shared, tile);
  if constexpr (kRowsToo) all_ordinary = store_row_divisors<kIsOrdinary>(shared, p, tile);
  if constexpr (kCastsBlocks) store_warp_keys<kIsOrdinary>(shared, tile);
  ptx::syncthreads();

  if constexpr (kCastsBlocks) {
    Divisor divisors[kBlocksOfLane];
#pragma unroll
    for (uint32_t i = 0; i < kBlocksOfLane; ++i) {
      divisors[i] = divisor_of<kIsOrdinary>(amax_of_block(shared, tile, i), p.min_amax, p.rounds_up);
      all_ordinary = all_ordinary && is_ordinary(divisors[i]);
    }
    // If the tile has a single scale, every thread has computed it, and no vote is needed.
    if (kIsOrdinary && !(kParts == 1 ? is_ordinary(divisors[0]) : ptx::syncthreads_and(all_ordinary))) return false;
    store_block_scales(p, tile, divisors);
    const auto divisor_of_element = [&](uint32_t e) { return divisors[e / (kElements / kBlocksOfLane)]; };
    if constexpr (kTurnsBlocks) transpose<kIsOrdinary>(shared, tile, divisor_of_element);
    if (!kTurnsBlocks || p.values != nullptr)
      store_tile<kIsOrdinary>(p, tile, [&](uint32_t, uint32_t e) { return divisor_of_element(e); });
  }
  const ColumnScale first(thread), second(thread + kNumThreads);
  Divisor of_first = {}, of_second = {};
  if (kNeedsColumns && first.is_there()) {
    of_first = store_column_divisor<kIsOrdinary>(shared, p, tile, first);
    all_ordinary = all_ordinary && is_ordinary(of_first);
  }
  if constexpr (kNeedsColumns && kColumnScales == 2) {
    of_second = store_column_divisor<kIsOrdinary>(shared, p, tile, second);
    all_ordinary = all_ordinary && is_ordinary(of_second);
  }
  if (!kCastsBlocks && !ptx::syncthreads_and(all_ordinary) && kIsOrdinary) return false;

  if constexpr (kNeedsColumns) {
    store_column_scale(p, tile, block_m, first, of_first.scale);
    if constexpr (kColumnScales == 2) store_column_scale(p, tile, block_m, second, of_second.scale);
  }
  if constexpr (kRowsToo) {
    const uint32_t row = thread - kBlock;
    if (thread >= kBlock && tile.row + row < p.m)
      ptx::st_global_f32(scale_at(p.scales, tile.row + row, p.scales_stride_m, block_k, p.scales_stride_k),
                         load_divisor(&shared.of_rows[row]).scale);
    store_tile<kIsOrdinary>(p, tile, [&](uint32_t i, uint32_t) { return load_divisor(&shared.of_rows[tile.row_of(i)]); });
  }
  if constexpr (kCastsChannels) {
    Divisor divisors[kElements];
#pragma unroll
    for (uint32_t e = 0; e < kElements; ++e) divisors[e] = load_divisor(&shared.of_columns[tile.part()][e][tile.lane]);
    store_tile<kIsOrdinary>(p, tile, [&](uint32_t, uint32_t e) { return divisors[e]; });
  }
  if constexpr (kCastsColumns) {
    if constexpr (!kTurnsBlocks)
      transpose<kIsOrdinary>(shared, tile, [&](uint32_t e) { return load_divisor(&shared.of_columns[tile.part()][e][tile.lane]); });
    ptx::syncthreads();
    store_columns(shared, p, tile);
  }
  return true;
}

// Casts a tile of any numbers. Without kRowsToo, rows are not cast, even if kCastsRows is set.
template <bool kRowsToo = kCastsRows>
DEVICE void cast_any_tile(TileStorage& shared, const TileCastParams& p, const Tile& tile) {
  if (__builtin_expect(!cast_tile<true, kRowsToo>(shared, p, tile), 0)) {
    ptx::syncthreads();  // the keys have been read
    cast_tile<false, kRowsToo>(shared, p, tile);
  }
}
