// D has the columns of a product in heads: cuda/head_parts.cuh.
//
// Two maps know the left and the right parts as [rows, heads, columns of a part]. TMA cuts a box off where its part begins
// and where it ends, so a panel is stored once for each part that it reaches into: once, if parts are whole panels.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "head_parts.cuh"
#include "params.cuh"
#include "ptx/tma.cuh"

struct Params : Product {
  HeadParts heads;
};

static_assert(!kPanelIsWide && !kAddsToD && !kWithC, "D of heads is BF16 without C");

// Where the panels of a tile lie in D.
struct Destination {
  const Params& p;
  Span span;

  template <typename Tile>
  DEVICE Destination(const Params& p_, const Tile&, uint32_t) : p(p_), span(p_.n) {}

  DEVICE void store(const uint8_t* panel, uint32_t column, uint32_t row) const {
    const uint32_t end = column + kPanelColumns < p.n ? column + kPanelColumns : p.n;
    const int32_t left = static_cast<int32_t>(p.heads.left), columns = static_cast<int32_t>(p.heads.columns);
    uint32_t head = p.heads.before(column);
    // Where the panel begins in the head's left part: before it, if the head begins inside the panel.
    int32_t at = static_cast<int32_t>(column - head * columns);
#pragma unroll 1
    for (; head * columns < end; ++head, at -= columns) {
      if (at < left) store_panel(&p.map_d, panel, at, head, row);
      if (at + static_cast<int32_t>(kPanelColumns) > left) store_panel(&p.map_right_d, panel, at - left, head, row);
    }
  }

  DEVICE void prefetch(uint32_t, uint32_t) const {}  // nothing is added to this D
};
