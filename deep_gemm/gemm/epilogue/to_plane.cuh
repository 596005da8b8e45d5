// D is several planes of one shape. A file that includes this one first defines Params, Tile and plane_of(p, tile).
#pragma once
#include "config.cuh"
#include "epilogue/panels.cuh"
#include "params.cuh"
#include "ptx/tma.cuh"

// Stores the panels of a tile at their coordinates in D.
struct Destination {
  const Params& p;
  uint32_t plane;
  Span span;

  DEVICE Destination(const Params& p_, const Tile& tile, uint32_t) : p(p_), plane(plane_of(p_, tile)), span(p_.n) {}

  DEVICE void store(const uint8_t* panel, uint32_t column, uint32_t row) const {
    if constexpr (kPanelIsWide)
      store_panel(&p.map_d, panel, 0, span.at_column(column), row, plane);
    else
      store_panel(&p.map_d, panel, column, row, plane);
  }

  DEVICE void prefetch(uint32_t column, uint32_t row) const {
    if constexpr (kPanelIsWide)
      ptx::tma_prefetch_4d(&p.map_d, 0, span.at_column(column), row, plane);
    else
      ptx::tma_prefetch_3d(&p.map_d, column, row, plane);
  }
};
