// D has the columns of a product in heads, each a left and a right part with columns between them that nobody writes:
//
//   columns of the product   | left 0 | right 0 | left 1 | right 1 | ...
//   columns of D             | left 0 | mid | right 0 | left 1 | mid | right 1 | ...
//
// Two maps know the left and the right parts as [rows, heads, columns of a part]. TMA cuts a box off where its part begins
// and where it ends, so a panel is stored once for each part that it reaches into: once, if parts are whole panels.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "params.cuh"
#include "ptx/tma.cuh"

struct Params : Product {
  uint32_t left, head;  // columns of a left part, and of both
};

static_assert(!kPanelIsWide && !kAddsToD && !kWithC, "D of heads is BF16 without C");

// Where the panels of a tile lie in D.
struct Destination {
  const Params& p;
  Span span;

  template <typename Tile>
  DEVICE Destination(const Params& p_, const Tile&, uint32_t) : p(p_), span(p_.n) {}

  DEVICE void store(const uint8_t* panel, uint32_t column, uint32_t row) const {
    const uint32_t end = column + kPanelColumns < p.n ? column + kPanelColumns : p.n, left = p.left;
    uint32_t head = column / p.head;
    // `at`: where the panel begins in the head, before it where the head begins inside the panel.
    int32_t at = static_cast<int32_t>(column - head * p.head);
#pragma unroll 1
    for (; head * p.head < end; ++head, at -= static_cast<int32_t>(p.head)) {
      if (at < static_cast<int32_t>(left)) store_panel(&p.map_d, panel, at, head, row);
      if (at + static_cast<int32_t>(kPanelColumns) > static_cast<int32_t>(left))
        store_panel(&p.map_right_d, panel, at - static_cast<int32_t>(left), head, row);
    }
  }

  DEVICE void prefetch(uint32_t, uint32_t) const {}  // nothing is added to this D
};
