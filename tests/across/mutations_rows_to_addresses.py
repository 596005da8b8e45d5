"""Ways to break the epilogue that stores rows at addresses, and the trials that must notice."""

from __future__ import annotations

from dataclasses import replace

from deep_gemm.across.rows_to_addresses import OUTPUT, OUTPUTS
from deep_gemm.core.check.recipes import MX, PER_ROW
from deep_gemm.gemm.config.of_tile import tile_config
from lab.sim.mutate import Mutation
from lab.sim.rows_to_addresses import AddressesTrial

ONE_UNIT = tile_config(128, 32, OUTPUT, k=128)
TWO_UNITS = replace(tile_config(128, 64, OUTPUT, k=128), unit_n=32, panel_columns=32)
"""A narrow tile that has two units, like the widest tiles."""
BY_THEMSELVES = tile_config(128, 64, OUTPUTS[PER_ROW, MX], k=128)
"""A tile for FP4 weights, whose math warps store D themselves."""
TRIALS = [
    *(
        AddressesTrial(ONE_UNIT, 72, 128, seed, name)
        for seed, name in ((1, None), (2, "late_stores"), (3, "slow_lanes"))
    ),
    *(
        AddressesTrial(TWO_UNITS, 72, 128, seed, name)
        for seed, name in ((4, None), (5, "late_stores"), (6, "slow_warps"))
    ),
    AddressesTrial(BY_THEMSELVES, 72, 128, 7),
]
_STORE, _KERNEL = "epilogue/store_rows.cuh", "fp8_gemm.cuh"
_WORK = "work/rows.cuh"
_WAITS_UNTIL_FREE = "ptx::mbarrier_wait_parity(&barriers.free[warpgroup], parity ^ 1), "
MUTATIONS = [
    Mutation("rows of a warpgroup alike", _STORE, "rows.expect(p, tile, warpgroup * 64);", "rows.expect(p, tile, 0);"),
    Mutation("rows of a warp alike", _STORE, "own.expect(p, tile, ptx::warp_index() * 16);", "own.expect(p, tile, 0);", shows_in=BY_THEMSELVES),
    Mutation("rows of a lane alike", _STORE, "row_of_part = i * 32 + ptx::lane_index()", "row_of_part = i * 32"),
    Mutation("the first 32 rows twice", _STORE, "row = first_row + row_of_part,", "row = first_row + ptx::lane_index(),"),
    Mutation("warps share a buffer", _STORE, "storage.buffers + ptx::warp_index() * kWarpBytes;", "storage.buffers;"),
    Mutation("the first warpgroup's buffer for all", _STORE, "storage.buffers + warpgroup * 4 * kWarpBytes", "storage.buffers"),
    Mutation("a tile's first rows' addresses", _STORE, "row_m = tile.row_m + row;", "row_m = row;"),
    Mutation("addresses of the tile before", _KERNEL, "      output.expect(p, tile);\n", "", shows_in=BY_THEMSELVES),
    Mutation("rows past the group's end go too", _STORE, "row_m < tile.end_m)", "row_m < p.m)"),
    Mutation("rows that the tile above stores are stored again", _STORE, "row >= tile.stored_before && ", "", shows_in=ONE_UNIT),
    Mutation("a row too few", _STORE, "row >= tile.stored_before", "row > tile.stored_before"),
    Mutation("rows of a tile that was not moved count as stored", _WORK, "tile.stored_before = index.m * kBlockM - tile.row_m;", "tile.stored_before = index.m > 0 ? 1 : 0;"),
    Mutation("what is stored before is not told", _WORK, "tile.group | tile.stored_before << kGroupBits | ", "tile.group | ", shows_in=ONE_UNIT),
    Mutation("half an address", _STORE, "uint64_t{ptx::shfl_sync(address.y, first + i)} << 32 | ", ""),
    Mutation("addresses of 4 bytes", _STORE, "uint64_t{first_address_of(tile) + row} * 8", "uint64_t{first_address_of(tile) + row} * 4"),
    Mutation("rows without room behind them", _STORE, "(part * 32 + first + i) * kRowPitch + at", "(part * 32 + first + i) * (kRowPitch - 16) + at"),
    Mutation("the first row for all", _STORE, "ptx::shfl_sync(address.x, first + i);", "ptx::shfl_sync(address.x, 0);"),
    Mutation("all rows begin at column 0", _STORE, "(to) + row_n * 2 + at", "(to) + at"),
    Mutation("columns past the last are stored", _STORE, "(left < kBlockN ? left : kBlockN) * 2", "kBlockN * 2"),
    Mutation("half of the columns", _STORE, "(left < kBlockN ? left : kBlockN) * 2", "(left < kBlockN ? left : kBlockN)"),
    Mutation("the first unit's columns alone", _STORE, "column < kBlockN; column", "column < kUnitN; column", shows_in=TWO_UNITS),
    Mutation("rows go nowhere's way", _STORE, "if (to != 0 && is_inside)", "if (is_inside)"),
    Mutation("words of a piece exchanged", _STORE, "pieces[i].x, pieces[i].y,", "pieces[i].y, pieces[i].x,"),
    Mutation("halves of words exchanged", _STORE, "ptx::pack_bf16(v[2], v[3])", "ptx::pack_bf16(v[3], v[2])"),
    Mutation("columns 8 to 15 over columns 0 to 7", _STORE, "(column + lane / 16 * 8) * 2", "column * 2"),
    Mutation("a buffer is written before it is free", _STORE, _WAITS_UNTIL_FREE, "", shows_in=ONE_UNIT),
    Mutation("rows are stored before they are ready", _STORE, "    ptx::mbarrier_wait_parity(&barriers.ready[warpgroup], parity);\n", ""),
    Mutation("one warp makes all rows ready", _STORE, "ptx::mbarrier_init(&ready[i], 4)", "ptx::mbarrier_init(&ready[i], 1)"),
    Mutation("ready before all lanes have written", _STORE, "    ptx::syncwarp();  // all lanes have written\n", ""),
    Mutation("tiles are ready each second time", _STORE, "== 0) ptx::mbarrier_arrive(&barriers.free[warpgroup]);\n    parity ^= 1;", "== 0) ptx::mbarrier_arrive(&barriers.free[warpgroup]);"),
    Mutation("all storing warps take the first warpgroup's rows", _KERNEL, "warp - (4 - kStoringWarps));", "0);"),
    Mutation("takers of tiles that store are not waited for", _WORK, "kNumMathWarps + kStoringWarps + 1", "kNumMathWarps + 1"),
]  # fmt: skip
