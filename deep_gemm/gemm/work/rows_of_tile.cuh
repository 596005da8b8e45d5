// Tiles of groups of rows: the share of a warpgroup, rows of other groups, loads, and positions in D. The file of a kind of
// work includes this file after it has defined Tile, kHasWholeD, `product_of`, `end_of_a`, `first_address_of`
// and `scale_parts_of`.
#pragma once

// A warpgroup's share of a tile: nothing if the group ends before the warpgroup's rows; its first units if the tile is
// short or narrow.
struct Share {
  bool is_any = false, is_part = false;

  DEVICE void set(const Tile& tile, uint32_t warpgroup) {
    // One result for the warp, or ptxas expects ring positions to differ by lane, and moves descriptors one by one.
    const auto ends_at = [&](uint32_t row) { return ptx::all_sync(tile.row_m + row >= tile.end_m); };
    is_any = !(kNumMathWarpgroups > 1 && ends_at(warpgroup * 64));
    if (!is_any) return;
    if constexpr (kUnitsOfPart > 0) is_part = kHasShortTiles ? ends_at(warpgroup * 64 + kUnitStride) : tile.is_narrow;
  }

  template <typename Use>
  DEVICE void with(Totals& total, const Use& use) const {
    constexpr uint32_t kFirstUnits = kUnitsOfPart > 0 ? kUnitsOfPart : kUnitsPerWarpgroup;
    if (kUnitsOfPart > 0 && !kBranchesOnParts && is_part)
      use(reinterpret_cast<float(&)[kFirstUnits][kUnitN / 2]>(total));
    else
      use(total);
  }
};

// ---- Rows that are not the group's
//
// A box of a tensor map must not reach past the end of its group's rows, neither to write nor to load. The maps of A
// and D have one more dimension: the `height` rows of a box, and `height` places where boxes begin, a pitch apart.
//
//   address of box row i = base + (i_first + i + place) * pitch      i_first + i < height is the hardware's bound
//
// The base is `height` rows before the tensor. So a box in place row + r whose first row is height - r has r rows of the
// tensor, from `row` on. The rest of the box is out of bounds: TMA loads zeros there, and stores nothing.
struct ClippedBox {
  uint32_t first, place;

  DEVICE ClippedBox(uint32_t row, uint32_t end, uint32_t height) {
    const uint32_t rows = row >= end ? 0 : end - row < height ? end - row : height;
    first = height - rows, place = row + rows;
  }
};

// Counts the rows of A to load for a tile: whole boxes, up to the group's last row. Older data after these rows in the
// slot are not multiplied, or only by a warpgroup that does not store these rows.
DEVICE uint32_t rows_loaded(const Tile& tile) {
  const uint32_t boxes = ceil_div(tile.end_m - tile.row_m, kBoxRowsOfA);
  return (boxes < kBlockM / kBoxRowsOfA ? boxes : kBlockM / kBoxRowsOfA) * kBoxRowsOfA;
}

// The index of the tile's matrix of rows: with kGroupCounts each group has its own matrix.
DEVICE uint32_t plane_of(const Tile& tile) { return kGroups == kGroupCounts ? tile.group : 0; }

// Scales that TMA loads before a tile's own: TMA begins at multiples of 16 bytes, but a group begins at any row.
DEVICE uint32_t skipped_scales(const Tile& tile) { return kRowsAreStacked ? tile.row_m % 4 : 0; }

// ---- Loads

DEVICE uint32_t bytes_of_slot(const Tile& tile) {
  const uint32_t no_scales = (kScaleParts - scale_parts_of(tile)) * kScaleRows * 4;  // bytes of scales that A does not have
  return kSlotBytes - (kBlockM - rows_loaded(tile)) * kLineBytes - (tile.is_narrow ? kBlockN - kBoxRowsOfB : 0) * kLineBytes -
         no_scales;
}

struct TileLoad {
  const Product& p;
  const Tile& tile;
  uint32_t slot_bytes;

  DEVICE TileLoad(const Params& p_, const Tile& tile_) : p(product_of(p_, tile_)), tile(tile_), slot_bytes(bytes_of_slot(tile_)) {}

  DEVICE void load_slot(const Slot& slot, uint32_t k_block, uint32_t k) const {
#pragma unroll
    for (uint32_t row = 0; row < kBlockM; row += kBoxRowsOfA) {
      if (row >= rows_loaded(tile)) break;
      const ClippedBox box(tile.row_m + row, end_of_a(tile), kBoxRowsOfA);
      ptx::tma_load_4d(&p.map_a, slot.full, slot.a + row * kLineBytes, k, box.first, box.place, plane_of(tile));
    }
#pragma unroll
    for (uint32_t row = 0; row < kBlockN; row += kBoxRowsOfB) {
      if (row > 0 && tile.is_narrow) break;
      load_rows<kBIsMnMajor, kBoxRowsOfB>(&p.map_b, slot.full_of_b, slot.b + row * kLineBytes, k / kPackedB,
                                          row_of_b(p, tile, tile.row_n + row), tile.group);
    }
    if constexpr (kHasScales) load_scales(slot, k_block);
  }

  DEVICE void load_scales(const Slot& slot, uint32_t k_block) const {
#pragma unroll
    for (uint32_t row = 0; row < kScaleRows; row += kBoxScaleRows)
      ptx::tma_load_3d(&p.map_sfa, slot.full, slot.scales + row, tile.row_m - skipped_scales(tile) + row,
                       k_block * scale_parts_of(tile), plane_of(tile));
    if constexpr (kSfbIsPerRow)
      ptx::tma_load_3d(&p.map_sfb, slot.full, slot.scales + kScaleParts * kScaleRows, tile.row_n,
                       k_block * kScalePartsOfB, tile.group);
  }
};

// Positions of a tile's panels in D. The plain map is used if the group has all stored rows, up to `end_row`.
struct Destination {
  const Params& p;
  const Tile& tile;
  Span span;
  bool is_whole;

  DEVICE Destination(const Params& p_, const Tile& tile_, uint32_t end_row)
      : p(p_), tile(tile_), span(p_.n), is_whole(kHasWholeD && end_row <= tile_.end_m) {}

  DEVICE void store(const uint8_t* panel, uint32_t column, uint32_t row) const {
    if (is_whole) {
      ptx::tma_store_3d(&p.map_whole_d, panel, column, row, plane_of(tile));
    } else {
      const ClippedBox rows(row, tile.end_m, 64);
      ptx::tma_store_4d(&p.map_d, panel, column, rows.first, rows.place, plane_of(tile));
    }
  }

  DEVICE void prefetch(uint32_t, uint32_t) const {}
};
