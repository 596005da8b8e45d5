// Casts x itself, without an activation.
#pragma once

using Loaded = Piece;
using Held = Piece;

DEVICE Loaded load(const CastParams& p, uint32_t row, bool is_there, uint32_t block, uint32_t lane) {
  return load_piece(p.x + uint64_t{row} * p.x_pitch, is_there, block * kBlock, p.k, lane);
}

DEVICE const Held& held_of(const CastParams&, const Loaded& loaded) { return loaded; }
