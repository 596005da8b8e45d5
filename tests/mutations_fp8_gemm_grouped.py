"""Ways to break what the fp8_gemm kernel adds for grouped rows, and the trials they meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from deep_gemm.config import GemmConfig, Groups, Output, tile_config
from deep_gemm.kernels import fp8_gemm
from deep_gemm.sim import fp8_gemm_grouped as sim
from deep_gemm.sim.fp8_gemm import compile_config
from deep_gemm.sim.mutate import Mutation


@dataclass(frozen=True)
class Trial:
    """One configuration, layout, seed and schedule."""

    config: GemmConfig
    layout: tuple[int, ...]
    seed: int
    schedule: str | None = None
    rows: int | None = None
    alignment: int = 128
    n: int = 136
    k: int = 400

    def headers(self) -> dict[str, str]:
        return fp8_gemm.headers(self.config)

    def run(self, headers: Mapping[str, str]) -> None:
        kernel = compile_config(self.config, headers)
        p = sim.random_problem(
            self.config, self.layout, self.n, self.k, self.seed, rows=self.rows, alignment=self.alignment
        )
        outcome = sim.run(kernel, self.config, p, seed=self.seed, schedule=self.schedule)
        if outcome.mistakes is not None:
            raise ValueError(outcome.mistakes)


IDS = tile_config(128, 64, Output(groups=Groups.IDS), k=128)
IDS_LOW = tile_config(64, 64, Output(groups=Groups.IDS), k=128)
IDS_BY_ROW = tile_config(64, 64, Output(groups=Groups.IDS, sfb_is_per_row=True), k=128)
ENDS_LOW = tile_config(64, 64, Output(groups=Groups.ENDS), k=128)
ENDS = tile_config(128, 64, Output(groups=Groups.ENDS), k=128)
COUNTS = tile_config(128, 64, Output(groups=Groups.COUNTS), k=128)
TWO_UNITS = tile_config(256, 64, Output(groups=Groups.COUNTS), k=128)
FEW_STAGES = GemmConfig(128, 64, 2, groups=Groups.COUNTS)

MIXED = (-1,) * 7 + (2,) * 70 + (0,) * 3 + (-1,) * 400 + (1,) * 257 + (2,) * 64 + (-1,) * 300 + (0,) * 5

TRIALS = [
    *(Trial(IDS, MIXED, 1, name) for name in (None, "slow_producer", "slow_warps", "slow_lanes", "late_loads")),
    *(Trial(IDS_LOW, MIXED, 2, name) for name in (None, "slow_math")),
    Trial(IDS_LOW, tuple(range(40)) * 2, 3, k=128, n=72),
    Trial(IDS_LOW, tuple(range(40)) * 2, 3, "slow_lanes", k=128, n=72),
    Trial(IDS_BY_ROW, MIXED, 4),
    Trial(ENDS, (3, 3, 70, 300, 300, 400, 600), 5, rows=640, alignment=16),
    Trial(ENDS_LOW, (3, 3, 129, 384 + 256, 641), 6, rows=700),
    Trial(ENDS, (3, 3, 129, 384 + 256, 641), 6, "slow_warpgroup", rows=700),
    *(Trial(COUNTS, (0, 3, 70, 0, 129, 256, 1), 7, name, rows=300) for name in (None, "slow_warpgroup", "late_stores")),
    *(Trial(TWO_UNITS, (0, 3, 70, 0, 129, 256, 1), 9, name, rows=300) for name in (None, "slow_math")),
    *(Trial(FEW_STAGES, (3, 70, 1), seed, "slow_warps", rows=70, n=72, k=128 * 24) for seed in (14, 16, 17)),
    Trial(COUNTS, (0,) * 40 + (5,), 8, rows=10, k=128, n=72),
]

_GEMM, _GROUPS, _SCHEDULER, _STORE = (f"{name}.cuh" for name in ("fp8_gemm", "groups", "scheduler", "store"))

MUTATIONS = [
    # The layout
    Mutation("-1 is a group", _GROUPS, "[&](uint32_t row) { return id_of_row(g, row) < g.count; });\n    if (stretch", "[&](uint32_t row) { return true; });\n    if (stretch", shows_in=IDS),
    Mutation("a stretch ends at the next row without a group", _GROUPS, "return id_of_row(g, row) != stretch.group;", "return id_of_row(g, row) >= g.count;", shows_in=IDS),
    Mutation("the row after a stretch is skipped", _GROUPS, "stretch.end = at = find(stretch.first + 1,", "at = 1 + find(stretch.first + 1, g.rows, [&](uint32_t row) { return id_of_row(g, row) != stretch.group; });\n    stretch.end = find(stretch.first + 1,", shows_in=IDS),
    Mutation("a search finds any lane's row", _GROUPS, "ptx::reduce_min_sync(found < count ? found : count)", "ptx::shfl_sync(found < count ? found : count, 0)"),
    Mutation("a search reads past the layout", _GROUPS, "is_found(index < count ? index : count - 1)", "is_found(index)"),
    Mutation("a search skips rows", _GROUPS, "first += 32 * kEach", "first += 64 * kEach"),
    Mutation("a group that ends before it begins has a stretch", _GROUPS, "end_of_group(g, i) > start_of_group(g, i)", "end_of_group(g, i) > 0", shows_in=ENDS_LOW),
    Mutation("groups begin where those before end", _GROUPS, "group == 0 ? 0 : ceil_div(end_before, g.alignment) * g.alignment;", "group == 0 ? 0 : end_before;", shows_in=ENDS),
    Mutation("each group twice", _GROUPS, "at = group + 1;", "at = group + (at & 1);", shows_in=COUNTS),
    # Dealing out
    Mutation("one taker is not waited for", _GROUPS, "kTileTakers = 1 + kNumMathWarps;", "kTileTakers = kNumMathWarps;"),
    Mutation("one taker too many is waited for", _GROUPS, "kTileTakers = 1 + kNumMathWarps;", "kTileTakers = 2 + kNumMathWarps;"),
    Mutation("every lane takes", _GROUPS, "!kIsWarp || ptx::lane_index() == 0);", "true);"),
    Mutation("does not wait for a free slot", _GROUPS, "    ptx::mbarrier_wait_parity(&queue.empty[slot], (number / kTileSlots & 1) ^ 1);\n", ""),
    Mutation("does not wait for a tile", _GROUPS, "  ptx::mbarrier_wait_parity(&queue.full[slot], number / kTileSlots & 1);\n", ""),
    Mutation("waits for the other parity of a free slot", _GROUPS, "(number / kTileSlots & 1) ^ 1", "(number / kTileSlots & 1)"),
    Mutation("waits for the other parity of a tile", _GROUPS, "queue.full[slot], number / kTileSlots & 1)", "queue.full[slot], ~number / kTileSlots & 1)"),
    Mutation("all lanes wait for a free slot, and one goes ahead", _GROUPS, "  if (ptx::lane_index() == 0) {\n    ptx::mbarrier_wait_parity(&queue.empty[slot], (number / kTileSlots & 1) ^ 1);\n", "  ptx::mbarrier_wait_parity(&queue.empty[slot], (number / kTileSlots & 1) ^ 1);\n  if (ptx::lane_index() == 0) {\n"),
    Mutation("tells of a tile before it is there", _GROUPS, "    ptx::st_shared_v4_b32(&queue.tiles[slot], tile.row_m, tile.row_n, tile.end_m, tile.group);\n    ptx::mbarrier_arrive(&queue.full[slot]);\n", "    ptx::mbarrier_arrive(&queue.full[slot]);\n    ptx::st_shared_v4_b32(&queue.tiles[slot], tile.row_m, tile.row_n, tile.end_m, tile.group);\n"),
    Mutation("nobody says that no tiles are left", _GEMM, "      deal(shared.queue, tiles, kNoMoreTiles);\n", ""),
    Mutation("the queue's barriers are not initialized", _GEMM, "    if constexpr (kGroups != kNoGroups) shared.queue.init();\n", ""),
    Mutation("two warps deal", _GEMM, "kGroups != kNoGroups && warp == 1)", "kGroups != kNoGroups && (warp == 1 || warp == 2))"),
    # Tiles
    Mutation("a stretch's tiles counted from the first of all", _SCHEDULER, "next_tile -= tiles_m * tiles_n;", ""),
    Mutation("tiles of a stretch rounded down", _SCHEDULER, "tiles_m = ceil_div(stretch.end - stretch.first, kBlockM);", "tiles_m = (stretch.end - stretch.first) / kBlockM;"),
    Mutation("tiles counted from the first row of all", _SCHEDULER, "tile.row_m += stretch.first, ", ""),
    Mutation("rows past the stretch belong to it", _SCHEDULER, "tile.end_m = stretch.end, ", "tile.end_m = stretch.first + tiles_m * kBlockM, "),
    # Operands
    Mutation("A of the first group", _GEMM, "k, rows.first, rows.place, plane_of(tile));", "k, rows.first, rows.place, 0);", shows_in=COUNTS),
    Mutation("A's scales of the first group", _GEMM, "tile.row_m, k_block, plane_of(tile));", "tile.row_m, k_block, 0);", shows_in=COUNTS),
    Mutation("B of the first group", _GEMM, "k, tile.row_n, tile.group);", "k, tile.row_n, 0);"),
    Mutation("B's scales of the first group", _GEMM, "p.sfb + tile.group * p.groups.sfb_stride;", "p.sfb;"),
    Mutation("B's scales by row of the first group", _GEMM, "tile.row_n, k_block, tile.group);", "tile.row_n, k_block, 0);", shows_in=IDS_BY_ROW),
    Mutation("planes of stacked rows", _GROUPS, "kGroups == kGroupCounts ? tile.group : 0;", "tile.group;"),
    # Rows that are not the group's
    Mutation("boxes are not cut off", _GROUPS, "row >= end ? 0 : end - row < height ? end - row : height;", "height;"),
    Mutation("boxes outside have a row", _GROUPS, "row >= end ? 0 :", "row >= end ? 1 :", shows_in=TWO_UNITS),
    Mutation("boxes lose their last row", _GROUPS, "end - row < height ? end - row : height;", "end - row <= height ? end - row - 1 : height;"),
    Mutation("the place is not moved with the cut", _GROUPS, "place = row + rows;", "place = row + height;"),
    Mutation("the second half of the rows is cut off as the first", _STORE, "ClippedBox rows(d_row, tile.end_m, 64);", "ClippedBox rows(row_m, tile.end_m, 64);", shows_in=TWO_UNITS),
    Mutation("D of the first group", _STORE, "d_column, rows.first, rows.place, plane_of(tile));", "d_column, rows.first, rows.place, 0);", shows_in=COUNTS),
    Mutation("slots of rows outside are not let go", _GEMM, "    release(ring, at, ptx::lane_index());\n", "", shows_in=COUNTS),
    Mutation("slots of rows outside are let go before they are loaded", _GEMM, "    wait_until_loaded(ring, at);\n    ptx::syncwarp();\n", "", shows_in=COUNTS),
    Mutation("one lane lets slots go ahead of its warp", _GEMM, "    wait_until_loaded(ring, at);\n    ptx::syncwarp();\n", "    wait_until_loaded(ring, at);\n", shows_in=FEW_STAGES),
    Mutation("a tile without rows for a warpgroup leaves its place in the ring", _GEMM, "++k_block, at = at.next()) {\n    wait_until_loaded(ring, at);", "++k_block) {\n    wait_until_loaded(ring, at);", shows_in=COUNTS),
    # Padding
    Mutation("padding is left as it is", _GEMM, "warp >= 2 && p.groups.zeroes_padding)", "warp >= 4 && p.groups.zeroes_padding)"),
    Mutation("padding of all rows without a group", _GROUPS, "== end) continue;\n      for", "== end + 1) continue;\n      for", shows_in=IDS),
    Mutation("rows of groups zeroed", _GROUPS, "        if (id_of_row(g, row) >= g.count) write_zeros", "        write_zeros", shows_in=IDS),
    Mutation("padding past the last row", _GROUPS, "row < padded && row < g.rows;", "row < padded;", shows_in=ENDS),
    Mutation("padding begins a row late", _GROUPS, "for (uint32_t row = end; row < padded", "for (uint32_t row = end + 1; row < padded", shows_in=ENDS),
    Mutation("padding past the end of a row", _GROUPS, "byte < row_bytes; byte += 512", "byte <= row_bytes; byte += 512"),
    Mutation("padding by every CTA from its first on", _GEMM, "ptx::block_index() * 2 + warp - 2,", "ptx::block_index() * 2,"),
]  # fmt: skip
