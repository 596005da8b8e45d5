// Casts tokens: a row of a group is the token of its route, times the row's weight if kIsWeighted.
#pragma once

using Storage = TileStorage;

DEVICE void cast_tile_of(const DepthsCastParams& p, Storage& shared, const Group& group, uint32_t block) {
  Tile tile = tile_of(group, block * kBlock);
  uint32_t tokens[kTeamRows];
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) {
    const uint32_t row = tile.row + tile.row_of(i);
    tokens[i] = row < group.rows ? ptx::ld_global_b32(p.token_of + group.first_row + row) : 0;
  }
#pragma unroll
  for (uint32_t i = 0; i < kTeamRows; ++i) {
    const bool is_there = tile.row + tile.row_of(i) < group.rows;
    tile.pieces[i] = load_piece(p.x + uint64_t{tokens[i]} * p.x_pitch, is_there, tile.column, p.k, tile.lane);
  }
  if constexpr (kIsWeighted) {
#pragma unroll
    for (uint32_t i = 0; i < kTeamRows; ++i) {
      const float weight = weight_of(p, group, tile.row + tile.row_of(i));
      store_elements(tile.pieces[i], [&](uint32_t e) { return ptx::mul_rn(element_of(tile.pieces[i], e), weight); });
    }
  }
  cast_any_tile(shared, target_of(group, p.columns, p.column_scales, p.stride_of_block, p.k), tile);
}
