// D holds the columns of a product in parts of heads: see gemm/head_parts.cuh.
//
// Two maps describe the left and the right parts as [rows, heads, columns of a part]. A part has a whole number of
// panels, so each panel is in one part. (Kernels with parts of 8 columns, whose boxes were wider than the part, stopped
// an H200 at an illegal instruction; the cause is unknown.)
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

// Stores the panels of a tile at their coordinates in D.
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
