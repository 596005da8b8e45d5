"""Ways to break the fp8_gemm kernel's code for grouped rows, and the trials that must notice."""

from __future__ import annotations

from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.mutate import Mutation
from lab.sim.rows import RowsTrial as Trial

IDS = tile_config(128, 64, Output(work=works.IDS), k=128)
IDS_LOW = tile_config(64, 64, Output(work=works.IDS), k=128)
IDS_LONG = tile_config(128, 16, Output(work=works.IDS), k=128)
IDS_BY_ROW = tile_config(64, 64, Output(work=works.IDS, sfb=PER_ROW), k=128)
ENDS_LOW = tile_config(64, 64, Output(work=works.ENDS), k=128)
ENDS = tile_config(128, 64, Output(work=works.ENDS), k=128)
COUNTS_LOW = tile_config(64, 64, Output(work=works.COUNTS), k=128)
COUNTS = tile_config(128, 64, Output(work=works.COUNTS), k=128)
TWO_UNITS = tile_config(256, 64, Output(work=works.COUNTS), k=128)
FOUR_UNITS = GemmConfig(256, 16, 3, 1, panel_columns=16, work=works.COUNTS)
"""A tile that calls never choose: some of its units may be past the group's end."""
FEW_STAGES = GemmConfig(128, 64, 2, work=works.COUNTS)
WIDE = tile_config(128, 192, Output(work=works.COUNTS), k=128)
CUT = tile_config(128, 256, Output(work=works.COUNTS), k=128)
IDS_CUT = tile_config(128, 256, Output(work=works.IDS), k=128)

MIXED = (-1,) * 7 + (2,) * 70 + (0,) * 3 + (-1,) * 400 + (1,) * 257 + (2,) * 64 + (-1,) * 300 + (0,) * 5

LONG = (0,) * 90 + (-1,) * 1901 + (1,) * 300 + (-1,) * 100 + (2,) * 50
"""More rows than a window of the layout holds, and a group that the window's end cuts."""

TRIALS = [
    *(Trial(IDS, MIXED, 1, name) for name in (None, "slow_producer", "slow_warps", "slow_lanes", "late_loads")),
    *(Trial(IDS_LOW, MIXED, 2, name) for name in (None, "slow_math")),
    Trial(IDS_LOW, (-1,) * 140 + (0,) * 3 + (-1,) * 130, 3, k=128, n=72, num_sms=2),
    Trial(IDS_LOW, tuple(id if row == 0 else -1 for id in range(3) for row in range(128)), 3, k=128, n=72, num_sms=5),
    Trial(IDS_LOW, (-1,) * 7 + (0,) * 70, 3, k=128, n=72, zero_padding=False),
    Trial(IDS_LOW, tuple(range(40)) * 2, 3, k=128, n=72),
    Trial(IDS_LOW, tuple(range(40)) * 2, 3, "slow_lanes", k=128, n=72),
    *(Trial(IDS_LONG, LONG, 4, name, k=16, n=8) for name in (None, "slow_lanes")),
    Trial(COUNTS_LOW, tuple(i % 3 for i in range(40)), 4, k=16, n=72),
    Trial(IDS_BY_ROW, MIXED, 4),
    Trial(ENDS, (3, 3, 70, 300, 300, 400, 600), 5, rows=640, alignment=16),
    Trial(ENDS_LOW, (3, 3, 129, 384 + 256, 641), 6, rows=700),
    Trial(ENDS, (3, 3, 129, 384 + 256, 641), 6, "slow_warpgroup", rows=700),
    *(Trial(COUNTS, (0, 3, 70, 0, 129, 256, 1), 7, name, rows=300) for name in (None, "slow_warpgroup", "late_stores")),
    *(Trial(TWO_UNITS, (0, 3, 70, 0, 129, 256, 1), 9, name, rows=300) for name in (None, "slow_math")),
    *(Trial(TWO_UNITS, (65, 192, 193, 257, 300), 11, how, rows=300) for how in (None, "slow_warpgroup", "slow_warps")),
    Trial(FOUR_UNITS, (3, 70, 0, 129, 200), 12, rows=260, n=24),
    *(Trial(FEW_STAGES, (3, 70, 1), seed, "slow_warps", rows=70, n=72, k=128 * 24) for seed in (14, 16, 17)),
    Trial(COUNTS, (0,) * 40 + (5,), 8, rows=10, k=128, n=72),
    *(Trial(CUT, (3, 0, 130), 13, name, rows=140, n=264) for name in (None, "slow_warpgroup")),
    Trial(CUT, (3, 0, 70), 13, rows=140, n=264, num_sms=3),
    Trial(CUT, (3, *(0,) * 32, 70), 15, rows=80, n=264, k=128, num_sms=5),
    Trial(CUT, (3,) * 40, 15, rows=3, n=136, k=128, num_sms=9),
    Trial(IDS_CUT, (0,) * 3 + (1,) * 130 + (-1,) * 5 + (2,) * 40, 16, n=264, num_sms=5),
    *(Trial(WIDE, (3, 0, 70, 130, 64), 10, name, rows=140, n=72) for name in (None, "slow_warpgroup")),
    *(Trial(IDS_LOW, tuple(row // 5 % 3 for row in range(700)), 3, name, k=128, n=72) for name in (None, "slow_lanes")),
]

_GEMM, _MAINLOOP, _TILE, _STORE = "fp8_gemm.cuh", "mainloop.cuh", "tile.cuh", "epilogue/store.cuh"
_SKIP = "fp8_gemm.cuh"
_WORK, _LAYOUT, _PADDING, _QUEUE = (f"work/{name}.cuh" for name in ("rows", "layout", "padding", "tile_queue"))
_OF_TILE = "work/rows_of_tile.cuh"
_WAIT_FREE = "    wait_until_free(number);\n"
_WAIT_DEALT = "    ptx::mbarrier_wait_parity(&full[number % kTileSlots], number / kTileSlots & 1);\n"
_WRITE = "    ptx::st_shared_v4_b32(&tiles[slot], tile.x, tile.y, tile.z, tile.w);\n"
_TELL = "    ptx::mbarrier_arrive(&full[slot]);\n"
_ONE_LANE_DEALS = "    if (ptx::lane_index() == 0)\n      storage.queue.deal("

MUTATIONS = [
    # The layout
    Mutation("-1 is a group", _LAYOUT, "[&](uint32_t id) { return id < g.count; });\n      at = first;", "[&](uint32_t id) { return true; });\n      at = first;", shows_in=IDS),
    Mutation("a stretch ends at the next row without a group", _LAYOUT, "{ return id != group; }", "{ return id >= g.count; }", shows_in=IDS),
    Mutation("the row after a stretch is skipped", _LAYOUT, "      at = end;\n", "      at = end + 1;\n", shows_in=IDS),
    Mutation("a run without a group is a stretch", _LAYOUT, "< g.count ? end : first, 0};", "< g.count ? end : end, 0};", shows_in=IDS_LOW),
    Mutation("a stretch of ids ends a run late", _LAYOUT, "&runs()[lane + 1])", "&runs()[lane + 2])", shows_in=IDS_LOW),
    Mutation("a run that goes on is passed over", _LAYOUT, "at = ptx::ld_shared_b32(&runs()[last]);", "at = window_end;", shows_in=IDS_LOW),
    Mutation("runs of 32 rows are numbered as those before", _LAYOUT, "number = count + ptx::popc(lanes", "number = ptx::popc(lanes", shows_in=IDS_LOW),
    Mutation("runs are not waited for", _LAYOUT, "    ptx::syncwarp();\n    if (count < 2) return false;", "    if (count < 2) return false;", shows_in=IDS_LOW),
    Mutation("a lane has a run too many", _LAYOUT, "count - 1 < 32 ? count - 1 : 32;", "count - 1;", shows_in=IDS_LOW),
    Mutation("a search finds any lane's row", _LAYOUT, "found = ptx::reduce_min_sync(found);", "found = ptx::shfl_sync(found, 0);", shows_in=IDS),
    Mutation("a search skips rows", _LAYOUT, "quad += 128)", "quad += 256)", shows_in=IDS),
    Mutation("a row of no group follows", _LAYOUT, "if (ptx::ld_shared_b32(&window[at - window_first]) >= g.count)  //", "if (false)  //", shows_in=IDS),
    Mutation("a search finds rows before it", _LAYOUT, "is_found(ids.x) && row >= first", "is_found(ids.x)", shows_in=IDS),
    Mutation("the window reaches past the layout", _LAYOUT, "if (row + 4 <= window_end)", "if (row <= window_end)", shows_in=IDS),
    Mutation("the last words of the window are left out", _LAYOUT, "      else  // nothing after the layout is read\n        ptx::st_shared_v4_b32(to, id_in_memory(g, row),", "      else\n        ptx::st_shared_v4_b32(to, 0xffffffff,", shows_in=IDS),
    Mutation("the window is not waited for", _LAYOUT, "    ptx::cp_async_wait_all();\n", "", shows_in=IDS),
    Mutation("a window that is not aligned", _LAYOUT, "window_first = first / 4 * 4;", "window_first = first;", shows_in=IDS_LONG),
    Mutation("a group that ends before it begins has rows", _LAYOUT, "start < end ? end : start", "true ? end : start", shows_in=ENDS_LOW),
    Mutation("tiles of 16 groups added up", _LAYOUT, "32; distance *= 2) add_those_before(distance);\n      else", "16; distance *= 2) add_those_before(distance);\n      else", shows_in=COUNTS_LOW),
    Mutation("tiles of 16 runs added up", _LAYOUT, "too few registers\n        for (uint32_t distance = 1; distance < 32;", "too few registers\n        for (uint32_t distance = 1; distance < 16;", shows_in=IDS_LOW),
    Mutation("tiles of groups before count", _LAYOUT, "tile < tiles_end ? ptx::lane_index() : 31", "tile <= tiles_end ? ptx::lane_index() : 31", shows_in=COUNTS_LOW),
    Mutation("tiles of a stretch counted from the first of 32 groups", _LAYOUT, " - found.stretch.tiles_m() * tiles_n);", ");", shows_in=COUNTS),
    Mutation("tiles of a stretch counted from the first of all", _LAYOUT, "tiles_before += tiles, tiles = 0;", "tiles = 0;", shows_in=IDS),
    Mutation("tiles of a stretch rounded down", _LAYOUT, "return ceil_div(end - first, kBlockM);", "return (end - first) / kBlockM;"),
    Mutation("groups begin where those before end", _LAYOUT, "group == 0 ? 0 : ceil_div(end_before, g.alignment) * g.alignment;", "group == 0 ? 0 : end_before;", shows_in=ENDS),
    # Dealing out
    Mutation("one taker is not waited for", _WORK, "queue.init(kNumMathWarps + kStoringWarps + 1 +", "queue.init(kNumMathWarps +"),
    Mutation("one taker too many is waited for", _WORK, "queue.init(kNumMathWarps + kStoringWarps + 1 +", "queue.init(kNumMathWarps + 2 +"),
    Mutation("every lane takes", _WORK, "!kIsWarp || ptx::lane_index() == 0);", "true);"),
    Mutation("does not wait for a free slot", _QUEUE, _WAIT_FREE, ""),
    Mutation("does not wait for a tile", _QUEUE, _WAIT_DEALT, ""),
    Mutation("waits for the other parity of a free slot", _QUEUE, _WAIT_FREE, _WAIT_FREE.replace(" ^ 1", "")),
    Mutation("waits for the other parity of a tile", _QUEUE, _WAIT_DEALT, _WAIT_DEALT.replace(", number", ", ~number")),
    Mutation("all lanes wait for a free slot, and one goes ahead", _WORK, _ONE_LANE_DEALS, _WAIT_FREE.replace("empty[slot]", "storage.queue.empty[number % kTileSlots]") + _ONE_LANE_DEALS),
    Mutation("tells of a tile before it is there", _QUEUE, _WRITE + _TELL, _TELL + _WRITE),
    Mutation("nobody says that no tiles are left", _WORK, "    deal(kNoMoreTiles);\n", ""),
    Mutation("the queue's barriers are not initialized", _GEMM, "    shared.roles.work.init();\n", ""),
    Mutation("two warps deal", _WORK, "if (warp != 1) return;", "if (warp != 1 && warp != 2) return;"),
    # Tiles
    Mutation("the last tile moved up too far", _TILE, "ceil_div(rows - height, 4) * 4 : 0", "(rows - height) / 4 * 4 : 0"),
    Mutation("the last tile moved to where TMA cannot load scales", _TILE, "ceil_div(rows - height, 4) * 4 : 0", "rows - height : 0", shows_in=COUNTS),
    Mutation("a whole tile taken for a short one", _OF_TILE, "is_part = kHasShortTiles ? ends_at(warpgroup * 64 + kUnitStride) :", "is_part = kHasShortTiles ? true :", shows_in=TWO_UNITS),
    Mutation("halves where there are CTAs for whole tiles only", _WORK, "middle = wave + ptx::grid_size() / 2;", "middle = wave + ptx::grid_size() - 1;", shows_in=CUT),
    Mutation("both halves the first", _WORK, "found.is_second_half = cta % 2 == 1;", "found.is_second_half = false;", shows_in=CUT),
    Mutation("the second half where the first is", _WORK, "tile.row_n += kUnitN;", "tile.row_n += 0;", shows_in=CUT),
    Mutation("halves in every wave", _WORK, "      if (wanted == middle) is_shared = false;\n", "", shows_in=CUT),
    Mutation("every CTA takes half of its own tile", _WORK, "search == 0 ? wave + cta / 2 :", "search == 0 ? wave + cta :", shows_in=CUT),
    Mutation("a half taken for a whole tile", _OF_TILE, ": tile.is_narrow;", ": false;", shows_in=CUT),
    Mutation("all of B loaded for a half", _OF_TILE, "      if (row > 0 && tile.is_narrow) break;\n", "", shows_in=CUT),
    Mutation("bytes of all of B expected for a half", _OF_TILE, "(tile.is_narrow ? kBlockN - kBoxRowsOfB : 0)", "0", shows_in=CUT),
    Mutation("all boxes of B from the tile's first column on", _OF_TILE, "row_of_b(p, tile, tile.row_n + row)", "row_of_b(p, tile, tile.row_n)", shows_in=CUT),
    Mutation("all boxes of B into a slot's first rows", _OF_TILE, "slot.b + row * kLineBytes, k", "slot.b, k", shows_in=CUT),
    Mutation("tiles counted from the first row of all", _WORK, "tile.row_m += found.stretch.first, ", ""),
    Mutation("rows past the stretch belong to it", _WORK, "tile.end_m = found.stretch.end, ", "tile.end_m = found.stretch.first + tiles_m * kBlockM, "),
    # Operands
    Mutation("A of the first group", _OF_TILE, "k, box.first, box.place, plane_of(tile));", "k, box.first, box.place, 0);", shows_in=COUNTS),
    Mutation("boxes of A rounded down", _OF_TILE, "boxes = ceil_div(tile.end_m - tile.row_m, kBoxRowsOfA);", "boxes = (tile.end_m - tile.row_m) / kBoxRowsOfA;", shows_in=WIDE),
    Mutation("more boxes of A than a slot has room for", _OF_TILE, "(boxes < kBlockM / kBoxRowsOfA ? boxes : kBlockM / kBoxRowsOfA)", "boxes", shows_in=WIDE),
    Mutation("bytes of all boxes expected", _OF_TILE, "return kSlotBytes - (kBlockM - rows_loaded(tile)) * kLineBytes - ", "return kSlotBytes - ", shows_in=WIDE),
    Mutation("all boxes of A from the tile's first row on", _OF_TILE, "box(tile.row_m + row,", "box(tile.row_m,", shows_in=WIDE),
    Mutation("all boxes of A into a slot's first rows", _OF_TILE, "slot.a + row * kLineBytes, k", "slot.a, k", shows_in=WIDE),
    Mutation("A's scales of the first group", _OF_TILE, "k_block * scale_parts_of(tile), plane_of(tile));", "k_block * scale_parts_of(tile), 0);", shows_in=COUNTS),
    Mutation("scales from the tile's first row on, which TMA cannot load", _OF_TILE, "tile.row_m - skipped_scales(tile) + row,\n", "tile.row_m + row,\n", shows_in=IDS),
    Mutation("scales of rows before the tile", _MAINLOOP, "  operands.scales.sfa += skipped_scales(tile);\n", "", shows_in=IDS),
    Mutation("B of the first group", _OF_TILE, "row_of_b(p, tile, tile.row_n + row), tile.group);", "row_of_b(p, tile, tile.row_n + row), 0);"),
    Mutation("B's scales of the first group", _WORK, "p.sfb + tile.group * p.groups.sfb_stride;", "p.sfb;"),
    Mutation("B's scales by row of the first group", _OF_TILE, "k_block * kScalePartsOfB, tile.group);", "k_block * kScalePartsOfB, 0);", shows_in=IDS_BY_ROW),
    Mutation("planes of stacked rows", _OF_TILE, "kGroups == kGroupCounts ? tile.group : 0;", "tile.group;"),
    # Rows that are not the group's
    Mutation("boxes are not cut off", _OF_TILE, "row >= end ? 0 : end - row < height ? end - row : height;", "height;"),
    Mutation("boxes outside have a row", _OF_TILE, "row >= end ? 0 :", "row >= end ? 1 :", shows_in=FOUR_UNITS),
    Mutation("boxes lose their last row", _OF_TILE, "end - row < height ? end - row : height;", "end - row <= height ? end - row - 1 : height;"),
    Mutation("the place is not moved with the cut", _OF_TILE, "place = row + rows;", "place = row + height;"),
    Mutation("the second half of the rows is cut off as the first", _OF_TILE, "ClippedBox rows(row, tile.end_m, 64);", "ClippedBox rows(tile.row_m + (row - tile.row_m) % kUnitStride, tile.end_m, 64);", shows_in=TWO_UNITS),
    Mutation("cut boxes stored whole", _OF_TILE, "end_row <= tile_.end_m", "end_row < tile_.end_m + 64"),
    Mutation("a warpgroup's second unit stored whole where the first is", _STORE, "row_m + row_of_unit(kUnits - 1) + 64", "row_m + 64", shows_in=TWO_UNITS),
    Mutation("whole boxes of the first group", _OF_TILE, "panel, column, row, plane_of(tile));", "panel, column, row, 0);", shows_in=COUNTS),
    Mutation("D of the first group", _OF_TILE, "panel, column, rows.first, rows.place, plane_of(tile));", "panel, column, rows.first, rows.place, 0);", shows_in=COUNTS),
    Mutation("slots of rows outside are not let go", _SKIP, "      release(ring, at, ptx::lane_index());\n", "", shows_in=COUNTS),
    Mutation("slots of rows outside are let go before they are loaded", _SKIP, "      wait_until_loaded(ring, at);\n      ptx::syncwarp();\n", "", shows_in=COUNTS),
    Mutation("one lane lets slots go ahead of its warp", _SKIP, "      wait_until_loaded(ring, at);\n      ptx::syncwarp();\n", "      wait_until_loaded(ring, at);\n", shows_in=FEW_STAGES),
    Mutation("a tile without rows for a warpgroup leaves its place in the ring", _SKIP, "(p, tile).end; ++k_block, at = at.next()) {", "(p, tile).end; ++k_block) {", shows_in=COUNTS),
    # Padding
    Mutation("padding is left as it is", _WORK, "if (p.groups.zeroes_padding)", "if (false)"),
    Mutation("padding is zeroed unasked", _WORK, "if (p.groups.zeroes_padding)", "if (true)"),
    Mutation("padding of all rows without a group", _PADDING, "if (!any || used", "if (used", shows_in=IDS),
    Mutation("rows of groups zeroed", _PADDING, "used >> ptx::lane_index() & 1 ||", "false ||", shows_in=IDS),
    Mutation("a part of the padding", _PADDING, "first_unit + each : units", "first_unit + each - 1 : units"),
    Mutation("padding of the first CTA alone", _PADDING, "first_unit = ptx::block_index() * each", "first_unit = 0"),
    Mutation("the first share's rows of all shares", _PADDING, "if (i == share) of_share", "if (i == 0) of_share", shows_in=IDS),
    Mutation("one share of the padding", _PADDING, "g.alignment + share * 32 +", "g.alignment +", shows_in=IDS),
    Mutation("the rows of the block before", _PADDING, "coming.load(g, (unit + 1) /", "coming.load(g, unit /", shows_in=IDS),
    Mutation("a block's use by its last rows", _PADDING, "any |= used != 0", "any = used != 0", shows_in=IDS),
    Mutation("padding past the last row of a block", _PADDING, " || row >= end_of_block(unit)) continue", ") continue", shows_in=IDS),
    Mutation("zeros are stored before they are there", _PADDING, "    ptx::fence_proxy_async_shared();\n", "", shows_in=IDS),
    Mutation("half of the window is zeroed", _PADDING, "i < kWindowRows; i += 128", "i < 4; i += 128", shows_in=IDS),
    Mutation("a CTA ends before its zeros are read", _PADDING, "    ptx::tma_store_wait_read<0>();\n", "", shows_in=IDS),
    Mutation("zeros past the end of a row", _PADDING, "row_bytes - byte < kWindowRows * 4 ? row_bytes - byte : kWindowRows * 4", "kWindowRows * 4", shows_in=IDS),
    Mutation("padding past the last row", _PADDING, "row < padded && row < g.rows;", "row < padded;", shows_in=ENDS),
    Mutation("padding begins a row late", _PADDING, "uint32_t row = end + unit %", "uint32_t row = end + 1 + unit %", shows_in=ENDS),
    Mutation("padding past the end of a row", _PADDING, "byte < row_bytes; byte += 512", "byte <= row_bytes; byte += 512"),
    Mutation("a look for runs reaches past the window", _LAYOUT, "at + most < window_end ? at + most : window_end;", "at + most;", shows_in=IDS_LOW),
]  # fmt: skip
