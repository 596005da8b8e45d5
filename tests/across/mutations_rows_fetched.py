"""Ways to break the fetch of rows by the kernel of both products, and the trials that must notice."""

from __future__ import annotations

from deep_gemm.across.rows_twice import OUTPUT_OF_FETCHED, config_for
from lab.sim.mutate import Mutation
from lab.sim.rows_fetched import RowsFetchedTrial

LOW, HIGH = (config_for(256, 256, band, OUTPUT_OF_FETCHED) for band in (1, 3))
TRIALS = [
    RowsFetchedTrial(LOW, (130, 0, 3, 65), 1, hidden=768, num_sms=3, lag=1),
    RowsFetchedTrial(LOW, (300, 65), 2, "late_stores", hidden=512, num_sms=2, limit=0.5, topk=9),
    RowsFetchedTrial(LOW, (300, 70, 0, 129, 1), 3, "slow_warps", hidden=512, num_sms=3, lag=4, slots=1),
    RowsFetchedTrial(LOW, (1, 300, 0, 70), 4, "slow_lanes", num_sms=4, share=1.0, slots=1),
    RowsFetchedTrial(LOW, (500, 3), 5, "slow_cta", num_sms=2, share=0.0, slots=1),
    RowsFetchedTrial(HIGH, (1300, 5), 6, num_sms=2, slots=1),
    RowsFetchedTrial(HIGH, (70, 5), 7, num_sms=2, is_met=False),
    RowsFetchedTrial(HIGH, (7,), 8, hidden=4352, num_sms=1),
]
_WORK, _FETCH, _QUEUE = "work/rows_twice.cuh", "work/fetch_rows.cuh", "work/tile_queue.cuh"
_EPILOGUE = "epilogue/silu_or_rows.cuh"
_FENCE = "      ptx::fence_proxy_async_global();\n      ptx::red_release_gpu_add_b32(count_of(p, Of::kFetched"
_FREE = "const uint32_t needed = ceil_div(p.n, kBlockN) * kPartsOfTile;\n      if"
_WAIT = "  if (kFetchesRows && !tile.is_second) wait_for_count("
_UNIT = "unit.block % p.slots * kBlockM + of_block;"
MUTATIONS = [
    Mutation("a tile waits for no rows", _WORK, _WAIT, "  if (false) wait_for_count("),
    Mutation("one unit of rows too few", _WORK, "tile.block, ceil_div(rows, kRowsOfUnit));", "tile.block, ceil_div(rows, kRowsOfUnit) - 1);"),
    Mutation("units of whole blocks", _WORK, "tile.block, ceil_div(rows, kRowsOfUnit));", "tile.block, kUnitsOfBlock);"),
    Mutation("no fence behind the rows", _WORK, _FENCE, _FENCE.partition("\n")[2]),
    Mutation("no fence ahead of the loads", _WORK, "  if (tile.is_in_ring()) ptx::fence", "  if (tile.is_second) ptx::fence"),
    Mutation("one lane counts ahead of the others' stores", _WORK, "    ptx::syncwarp();  // all lanes have stored\n", ""),
    Mutation("a count that releases nothing", _WORK, "red_release_gpu_add_b32(count_of(p, Of::kFetched, block), 1)", "atom_add(count_of(p, Of::kFetched, block), 1)"),
    Mutation("a slot is written before it is free", _WORK, _FREE, _FREE.replace("ceil_div(p.n, kBlockN) * kPartsOfTile", "0")),
    Mutation("a warp that has rows to fetch waits until it may deal", _WORK, "storage.queue.is_free(number + ahead))", "(storage.queue.wait_until_free(number + ahead), true))"),
    Mutation("a unit whose slot is not free yet is left", _WORK, ">= needed)) return true;", ">= needed)) return unit.rows = 0, true;"),
    Mutation("no unit behind an empty one", _WORK, "  if (unit.rows == 0) return true;", "  if (unit.rows == 0) return false;"),
    Mutation("the first band's units are fetched twice", _WORK, "kUnitsOfBand + claim(rows_from)", "claim(rows_from)"),
    Mutation("all units are for all warps", _WORK, "claim(Next::kRowsOfAll)) < kUnitsOfBand && find_unit", "claim(Next::kRowsOfAll)) >= 0 && find_unit"),
    Mutation("each block goes to the first slot", _WORK, _UNIT, "of_block;"),
    Mutation("each unit goes to the block's first rows", _WORK, _UNIT, "unit.block % p.slots * kBlockM;"),
    Mutation("rows of the group's first block", _WORK, "found.number * kBlockM + of_block", "of_block"),
    Mutation("rows behind the group's", _WORK, "left < kRowsOfUnit ? left : kRowsOfUnit;", "kRowsOfUnit;"),
    Mutation("all rows of the first rank", _FETCH, "meeting.rooms[token / rooms.max_tokens] + uint64_t", "meeting.rooms[0] + uint64_t"),
    Mutation("tokens count over all ranks", _FETCH, "uint64_t{token % rooms.max_tokens} * rooms.row_bytes", "uint64_t{token} * rooms.row_bytes"),
    Mutation("rows without their scales between them", _FETCH, "* rooms.row_bytes;", "* hidden;"),
    Mutation("the first rows for all", _FETCH, "shfl_sync(token, first_row + row)", "shfl_sync(token, row)"),
    Mutation("the first columns for all", _FETCH, "first_column + column, staging", "column, staging"),
    Mutation("the first rows alone", _FETCH, "      if (row >= unit.rows) break;\n      bring", "      if (row > 0) break;\n      bring"),
    Mutation("columns behind a row's end", _FETCH, "if (first_column + column < hidden) use", "use"),
    Mutation("staged rows on one another", _FETCH, "staging + row * kStagedColumns + column", "staging + column"),
    Mutation("copies that have not come", _FETCH, "    ptx::cp_async_wait_all();\n", ""),
    Mutation("math warps write a buffer where rows are staged", _EPILOGUE, "second.parity = 1;", "second.parity = 0;"),
    Mutation("scales of the first row", _FETCH, "row = room_row(ptx::shfl_sync(token, i));", "row = room_row(ptx::shfl_sync(token, 0));"),
    Mutation("scales that begin with the row", _FETCH, "row + rooms.scales_at + block * 4", "row + block * 4"),
    Mutation("one block's scales", _FETCH, "uint64_t{block} * rooms.pitch + unit", "unit"),
    Mutation("a rank that missed another reads rooms", _FETCH, "const bool is_met = is_whole(meeting);", "const bool is_met = true;"),
    Mutation("results of the first rank", _FETCH, "reinterpret_cast<uint64_t>(meeting.rooms[token / rooms.max_tokens])", "reinterpret_cast<uint64_t>(meeting.rooms[0])"),
    Mutation("results of the first route", _FETCH, "* rooms.topk + route) * hidden * 2;", "* rooms.topk) * hidden * 2;"),
    Mutation("the first routes alone", _FETCH, "route < rooms.topk; route += kLanesOfRow", "route < rooms.topk && route < kLanesOfRow; route += kLanesOfRow"),
    Mutation("results where rows are", _FETCH, "room + rooms.results + place", "room + place"),
    Mutation("no addresses", _EPILOGUE, "    if (kFetchesRows && tile.is_second) rows.expect(p.second, tile, warpgroup * 64);  // fetched with the rows\n", ""),
]  # fmt: skip
