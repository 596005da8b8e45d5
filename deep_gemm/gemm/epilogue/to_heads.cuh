// D has the columns of a product in heads: gemm/head_parts.cuh.
//
// Two maps know the left and the right parts as [rows, heads, columns of a part]. Parts are whole panels, so a panel lies in
// one of them. (Kernels with parts of 8 columns, whose boxes of a panel were wider than the part, stopped an H200 at an illegal
// instruction. Why is not known.)
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
    if (column >= p.n) return;
    const uint32_t head = p.heads.before(column), at = column - head * p.heads.columns;
    if (at < p.heads.left)
      store_panel(&p.map_d, panel, at, head, row);
    else
      store_panel(&p.map_right_d, panel, at - p.heads.left, head, row);
  }

  DEVICE void prefetch(uint32_t, uint32_t) const {}  // nothing is added to this D
};
