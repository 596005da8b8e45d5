"""Ways to break the epilogue that stores rows at addresses, and the trials they meet."""

from __future__ import annotations

from dataclasses import replace

from deep_gemm.across.rows_to_addresses import OUTPUT
from deep_gemm.gemm.config_of_tile import tile_config
from lab.sim.mutate import Mutation
from lab.sim.rows_to_addresses import AddressesTrial

ONE_UNIT = tile_config(128, 32, OUTPUT, k=128)
TWO_UNITS = replace(tile_config(128, 64, OUTPUT, k=128), unit_n=32, panel_columns=32)
"""As the widest tiles have, but narrow."""
TRIALS = [
    *(
        AddressesTrial(ONE_UNIT, 72, 128, seed, name)
        for seed, name in ((1, None), (2, "late_stores"), (3, "slow_lanes"))
    ),
    *(
        AddressesTrial(TWO_UNITS, 72, 128, seed, name)
        for seed, name in ((4, None), (5, "late_stores"), (6, "slow_warps"))
    ),
]
_STORE, _KERNEL = "epilogue/store_rows.cuh", "fp8_gemm.cuh"
_WORK = "work/rows.cuh"
MUTATIONS = [
    Mutation("rows of a warp alike", _STORE, "row_of_lane = ptx::warp_index() * 16 + ptx::lane_index();", "row_of_lane = ptx::lane_index();"),
    Mutation("rows of a lane alike", _STORE, "row_of_lane = ptx::warp_index() * 16 + ptx::lane_index();", "row_of_lane = ptx::warp_index() * 16;"),
    Mutation("warps share a buffer", _STORE, "storage.buffers + ptx::warp_index() * kWarpBytes;", "storage.buffers;"),
    Mutation("a tile's first rows' addresses", _STORE, "row_m = tile.row_m + row;", "row_m = row;"),
    Mutation("addresses of the tile before", _KERNEL, "      output.expect(p, tile);\n", ""),
    Mutation("rows past the group's end go too", _STORE, "row_m < tile.end_m)", "row_m < p.m)"),
    Mutation("rows that the tile above stores are stored again", _STORE, "row >= tile.stored_before && ", "", shows_in=ONE_UNIT),
    Mutation("a row too few", _STORE, "row >= tile.stored_before", "row > tile.stored_before"),
    Mutation("rows of a tile that was not moved count as stored", _WORK, "tile.stored_before = index.m * kBlockM - tile.row_m;", "tile.stored_before = index.m > 0 ? 1 : 0;"),
    Mutation("what is stored before is not told", _WORK, "tile.group | tile.stored_before << kGroupBits | ", "tile.group | ", shows_in=ONE_UNIT),
    Mutation("half an address", _STORE, "uint64_t{words.y} << 32 | words.x", "words.x"),
    Mutation("addresses of 4 bytes", _STORE, "uint64_t{row_m} * 8", "uint64_t{row_m} * 4"),
    Mutation("rows without room behind them", _STORE, "rows + row * kRowPitch + at", "rows + row * (kRowPitch - 16) + at"),
    Mutation("the first row for all", _STORE, "ptx::shfl_sync(low, row);", "ptx::shfl_sync(low, 0);"),
    Mutation("all rows begin at column 0", _STORE, "(to) + row_n * 2 + at", "(to) + at"),
    Mutation("columns past the last are stored", _STORE, "(p.n - row_n < columns ? p.n - row_n : columns) * 2", "columns * 2"),
    Mutation("half of the columns", _STORE, "(p.n - row_n < columns ? p.n - row_n : columns) * 2", "(p.n - row_n < columns ? p.n - row_n : columns)"),
    Mutation("the first unit's columns alone", _STORE, "tile.row_n, kAtOnce * kUnitN, addresses", "tile.row_n, kUnitN, addresses", shows_in=TWO_UNITS),
    Mutation("rows go nowhere's way", _STORE, "      if (to == 0) continue;\n", ""),
    Mutation("words of a piece exchanged", _STORE, "piece.x, piece.y, piece.z, piece.w", "piece.y, piece.x, piece.z, piece.w"),
    Mutation("halves of words exchanged", _STORE, "ptx::pack_bf16(v[2], v[3])", "ptx::pack_bf16(v[3], v[2])"),
    Mutation("columns 8 to 15 over columns 0 to 7", _STORE, "(column + lane / 16 * 8) * 2", "column * 2"),
]  # fmt: skip
