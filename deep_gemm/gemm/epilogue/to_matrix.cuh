// D of one product is a plain matrix.
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "params.cuh"
#include "ptx/tma.cuh"

struct Params : Product {};

// Stores the panels of a tile at their coordinates in D.
struct Destination {
  const Params& p;
  Span span;

  template <typename Tile>
  DEVICE Destination(const Params& p_, const Tile&, uint32_t) : p(p_), span(p_.n) {}

  DEVICE void store(const uint8_t* panel, uint32_t column, uint32_t row) const {
    if constexpr (kPanelIsWide)
      store_panel(&p.map_d, panel, 0, span.at_column(column), row);
    else
      store_panel(&p.map_d, panel, column, row);
  }

  DEVICE void prefetch(uint32_t column, uint32_t row) const {
    if constexpr (kPanelIsWide)
      ptx::tma_prefetch_3d(&p.map_d, 0, span.at_column(column), row);
    else
      ptx::tma_prefetch_2d(&p.map_d, column, row);
  }
};
