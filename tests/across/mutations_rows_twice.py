"""Ways to break the kernel of both products of experts' rows, and the trials that must notice."""

from __future__ import annotations

from deep_gemm.across.rows_twice import OUTPUT_IN_TURN, config_for
from lab.sim.mutate import Mutation
from lab.sim.rows_twice import RowsTwiceTrial

LOW, ODD, HIGH = config_for(256, 256, band=1), config_for(272, 256, band=1), config_for(256, 256, band=3)
TURN = config_for(256, 256, OUTPUT_IN_TURN, band=1)
FEW_FIRST = config_for(4096, 128, OUTPUT_IN_TURN, band=1)
TRIALS = [
    RowsTwiceTrial(LOW, (130, 0, 3, 65), 1, hidden=768, num_sms=3, lag=1),
    RowsTwiceTrial(ODD, (130, 0, 3, 64), 1, hidden=272, num_sms=3, lag=1),
    RowsTwiceTrial(LOW, (300, 65), 2, "late_stores", hidden=512, num_sms=2, limit=0.5, topk=9),
    RowsTwiceTrial(HIGH, (390,), 4, "slow_warps", intermediate=512, num_sms=4, lag=3),
    RowsTwiceTrial(HIGH, (130,), 5, "slow_lanes", num_sms=1, late_ctas=1),
    RowsTwiceTrial(LOW, (300, 70, 0, 129, 1), 6, "slow_warps", hidden=512, num_sms=3, lag=4, slots=1),
    RowsTwiceTrial(LOW, (1, 300, 0, 70), 7, "slow_lanes", intermediate=1024, num_sms=4, share=1.0, slots=1),
    RowsTwiceTrial(LOW, (500, 3), 8, "slow_cta", num_sms=2, share=0.0, slots=1),
    RowsTwiceTrial(LOW, (400,), 3, "slow_warps", hidden=2048, num_sms=8, slots=1),
    RowsTwiceTrial(LOW, (300, 70, 0, 129, 1), 3, hidden=512, num_sms=5, share=1.0, lag=4, slots=1),
    RowsTwiceTrial(HIGH, (1300, 5), 9, num_sms=2, slots=1),
    RowsTwiceTrial(HIGH, (1300, 5), 3, "slow_cta", hidden=512, num_sms=3, lag=4, slots=1),
    RowsTwiceTrial(HIGH, (70, 5), 7, num_sms=2, is_met=False),
    RowsTwiceTrial(LOW, (0, 0, 0), 7, num_sms=3),
    RowsTwiceTrial(FEW_FIRST, (400, 3), 1, hidden=4096, intermediate=128, num_sms=2, lag=1, slots=1),
    RowsTwiceTrial(HIGH, (7,), 8, hidden=4352, num_sms=1),
    RowsTwiceTrial(TURN, (130, 65), 9, num_sms=2, limit=0.5),
    RowsTwiceTrial(TURN, (300, 70), 6, "slow_warps", hidden=272, num_sms=3, lag=4, slots=1),
]
_MEET, _WORK, _FETCH, _EPILOGUE, _STORE = (
    "meeting.cuh",
    "work/rows_twice.cuh",
    "work/fetch_rows.cuh",
    "epilogue/silu_or_rows.cuh",
    "epilogue/store_rows.cuh",
)
_COUNT = "  ptx::red_release_gpu_add_b32(count_of(p, tile.is_second ? Of::kRead : Of::kWhole, tile.block), parts_of(tile));\n"
_WRITER = "  if (!tile.is_second) ptx::fence_proxy_async_global();\n"
_SLOT = "if (tile.block >= p.slots) wait_for_count("
_READ = """    ptx::mbarrier_wait_parity(&barriers.ready[warpgroup], parity);
    if (ptx::lane_index() == 0) count_tile(p, tile);
"""
_READ_AHEAD = "".join(reversed(_READ.splitlines(keepends=True)))
_TAKEN = "    if constexpr (!kIsWarp) wait_for_operands(p, tile);\n"
_READER = "  ptx::fence_proxy_async_global();\n}\n\n// Called by each finding"
_FENCE = "      ptx::fence_proxy_async_global();\n      ptx::red_release_gpu_add_b32(count_of(p, Of::kFetched"
_FREE = "const uint32_t needed = ceil_div(p.n, kBlockN) * kPartsOfTile;\n      if"
_WAIT = "wait_for_count(p, Of::kFetched, "
_UNIT = "unit.block % p.slots * kBlockM + of_block;"
MUTATIONS = [
    Mutation("a tile waits for no block", _WORK, "wait_for_count(p, Of::kWhole, ", "if (false) wait_for_count(p, Of::kWhole, "),
    Mutation("a count that releases nothing", _WORK, _COUNT, _COUNT.replace("red_release_gpu_add_b32", "atom_add")),
    Mutation("a read of the count that acquires nothing", _WORK, "while (ptx::ld_acquire_gpu_b32(", "while (ptx::ld_relaxed_gpu_b32("),
    Mutation("no fence behind the stores", _WORK, _WRITER, ""),
    Mutation("no fence ahead of the loads", _WORK, _READER, _READER.partition("\n")[2]),
    Mutation("one part too few is waited for", _WORK, "of, block)) < needed)", "of, block)) + 1 < needed)"),
    Mutation("one part too many is waited for", _WORK, "of, block)) < needed)", "of, block)) < needed + 1)"),
    Mutation("one part for each warpgroup, where one has no rows", _WORK, "kPartsOfTile / 2 : kPartsOfTile;", "kPartsOfTile / 2 : kPartsOfTile / 2;"),
    Mutation("each warpgroup counts for both", _WORK, "kPartsOfTile / 2 : kPartsOfTile;", "kPartsOfTile : kPartsOfTile;"),
    Mutation("parts by columns of the second product", _WORK, "kWhole, tile.block, ceil_div(p.n,", "kWhole, tile.block, ceil_div(p.second.n,"),
    Mutation("a tile waits for no slot", _WORK, _SLOT, "if (false) wait_for_count("),
    Mutation("a slot is read by fewer columns", _WORK, "needed = ceil_div(p.second.n, kBlockN)", "needed = ceil_div(p.second.n / 2, kBlockN)"),
    Mutation("a slot is waited for by the block behind", _WORK, _SLOT, _SLOT.replace(">=", ">")),
    Mutation("a slot is read before it is multiplied", _EPILOGUE, _READ, _READ_AHEAD),
    Mutation("a slot is never read", _WORK, _COUNT, "  if (!tile.is_second) ptx::red_release_gpu_add_b32(count_of(p, Of::kWhole, tile.block), parts_of(tile));\n"),
    Mutation("one count for both products", _WORK, "static_cast<uint32_t>(of) * p.blocks + block", "block"),
    Mutation("all CTAs are of the first role", _WORK, "return (ptx::block_index() * of_second + of_first - 1) % ctas >= of_first;", "return false;"),
    Mutation("the first CTA is of the second role", _WORK, "return (ptx::block_index() * of_second + of_first - 1) % ctas >= of_first;", "return ptx::block_index() * of_second % ctas < of_second;"),
    Mutation("no CTA is of the first role", _WORK, "wanted > 0 ? wanted : 1;", "wanted;"),
    Mutation("a CTA whose tiles wait for slots claims tiles of the second product", _WORK, "ahead = kTileSlots - 1;", "ahead = kLate;"),
    Mutation("a tile's place is free before it has its slot", _WORK, _TAKEN, ""),
    Mutation("tiles for all are computed twice", _WORK, "find(tile, p.lag + claim(from))", "find(tile, claim(from))"),
    Mutation("tiles of the second product behind `lag` alone", _WORK, "is_found = find(tile, claim(from))", "is_found = find(tile, p.lag + claim(from))"),
    Mutation("all tiles of the first product are for all", _WORK, "if (wanted < p.lag && find(", "if (find("),
    Mutation("all blocks have the first slot", _WORK, "tile.block % p.slots * kBlockM;", "0;"),
    Mutation("each group begins with the first slot", _WORK, "tile.block = (wanted - found.number) / tiles_n + index.m;", "tile.block = index.m;"),
    Mutation("addresses by where rows lie in the ring", _STORE, "uint64_t{first_address_of(tile) + row} * 8", "uint64_t{row_m} * 8"),
    Mutation("blocks are not told", _WORK, "tile.row_n / kBlockN | tile.block << kColumnBits", "tile.row_n / kBlockN"),
    Mutation("all tiles are the first product's", _WORK, " | static_cast<uint32_t>(tile.is_second) << 31}", "}"),
    Mutation("depth of the first product for both", _WORK, "KBlocks(product_of(p, tile).k);", "KBlocks(p.k);"),
    Mutation("gates' rows for both", _WORK, "tile.is_second ? column : row_of_gates", "false ? column : row_of_gates"),
    Mutation("gate and up from one row on", "params.cuh", "(column % kTurn < kGateColumns ? 0 : p.n / 2)", "0"),
    Mutation("scales of gates for both", _WORK, "  if (tile.is_second) {\n    scales.row[0]", "  if (false) {\n    scales.row[0]"),
    Mutation("one scale for both blocks", _WORK, "(tile.row_n + kScaleRowsOfB < of.n ? of.sfb_stride_n : 0)", "0"),
    Mutation("groups' scales alike", _WORK, "(tile.is_second ? p.second_sfb_stride : p.groups.sfb_stride)", "p.groups.sfb_stride"),
    Mutation("tiles are counted before they are written", _EPILOGUE, "    first.store_tile(p, tile, total);\n    second.hand_over();\n", "    second.hand_over();\n    first.store_tile(p, tile, total);\n"),
    Mutation("a tile is handed over before all lanes have stored", _STORE, "    ptx::syncwarp();  // all lanes have stored\n", ""),
    Mutation("a tile is handed over while another is stored", _STORE, "  DEVICE void hand_over() {\n    wait_until_free();\n", "  DEVICE void hand_over() {\n"),
    Mutation("columns of the first product", _EPILOGUE, "rows.store(p.second, ", "rows.store(p, "),
    Mutation("a counter is left", _WORK, "&p.counts->next[0] + word", "&p.counts->next[1] + word"),
    Mutation("the last CTA but one leaves zeros", _WORK, "(1 + kStoringWarps)) return;", "(1 + kStoringWarps) - 1) return;"),
    Mutation("a tile waits for no rows", _WORK, _WAIT, "if (false) " + _WAIT),
    Mutation("one unit of rows too few", _WORK, "tile.block, ceil_div(rows, kRowsOfUnit));", "tile.block, ceil_div(rows, kRowsOfUnit) - 1);"),
    Mutation("units of whole blocks", _WORK, "tile.block, ceil_div(rows, kRowsOfUnit));", "tile.block, kUnitsOfBlock);"),
    Mutation("no fence behind the rows", _WORK, _FENCE, _FENCE.partition("\n")[2]),
    Mutation("no fence ahead of the first product's loads", _WORK, _READER, "  if (tile.is_second)" + _READER[1:]),
    Mutation("one lane counts ahead of the others' stores", _WORK, "    ptx::syncwarp();  // all lanes have stored\n", ""),
    Mutation("a count of fetched rows that releases nothing", _WORK, "red_release_gpu_add_b32(count_of(p, Of::kFetched", "atom_add(count_of(p, Of::kFetched"),
    Mutation("a slot is written before it is free", _WORK, _FREE, _FREE.replace("ceil_div(p.n, kBlockN) * kPartsOfTile", "0")),
    Mutation("a warp that has rows to fetch waits until it may deal", _WORK, "storage.queue.is_free(number + ahead))", "(storage.queue.wait_until_free(number + ahead), true))"),
    Mutation("a unit whose slot is not free yet is left", _WORK, ">= needed)) return true;", ">= needed)) return unit.rows = 0, true;"),
    Mutation("no unit behind an empty one", _WORK, "if (unit.rows == 0) return claim_unit(unit);", "if (unit.rows == 0) return claim_unit(unit) && unit.rows > 0;"),
    Mutation("the first band's units are fetched twice", _WORK, "kUnitsOfBand + claim(rows_from)", "claim(rows_from)"),
    Mutation("all units are for all warps", _WORK, "claim(Next::kRowsOfAll)) < kUnitsOfBand && find_unit", "claim(Next::kRowsOfAll)) >= 0 && find_unit"),
    Mutation("each block goes to the first slot", _WORK, _UNIT, "of_block;"),
    Mutation("each unit goes to the block's first rows", _WORK, _UNIT, "unit.block % p.slots * kBlockM;"),
    Mutation("rows of the group's first block", _WORK, "found.number * kBlockM + of_block", "of_block"),
    Mutation("rows behind the group's", _WORK, "left < kRowsOfUnit ? left : kRowsOfUnit;", "kRowsOfUnit;"),
    Mutation("all rows of the first rank", _MEET, "m.rooms[slot / max_tokens] + uint64_t", "m.rooms[0] + uint64_t"),
    Mutation("tokens count over all ranks", _MEET, "uint64_t{slot % max_tokens} * row_bytes", "uint64_t{slot} * row_bytes"),
    Mutation("rows without their scales between them", _FETCH, "rooms.max_tokens, rooms.row_bytes);", "rooms.max_tokens, hidden);"),
    Mutation("the first rows for all", _FETCH, "shfl_sync(unit.token, unit.staged_row + i)", "shfl_sync(unit.token, i)"),
    Mutation("the first columns for all", _FETCH, "kStagedColumns + column, first_column + column);", "kStagedColumns + column, column);"),
    Mutation("the first rows alone", _FETCH, "if (unit.staged_row >= unit.rows) return false;", "if (unit.staged_row > 0) return false;"),
    Mutation("rows from where the unit before ended", _FETCH, "    unit.staged_row = unit.staged_column = 0;\n", ""),
    Mutation("columns behind a row's end", _FETCH, "if (first_column + column < hidden) use", "use"),
    Mutation("staged rows on one another", _FETCH, "staging + staged_row * kStagedColumns + column", "staging + column"),
    Mutation("copies that have not come", _FETCH, "    ptx::cp_async_wait_all();\n", ""),
    Mutation("math warps write a buffer where rows are staged", _EPILOGUE, "second.parity = 1;", "second.parity = 0;"),
    Mutation("scales of the first row", _FETCH, "row = room_row(ptx::shfl_sync(unit.token, i));", "row = room_row(ptx::shfl_sync(unit.token, 0));"),
    Mutation("scales that begin with the row", _FETCH, "row + rooms.scales_at + block * 4", "row + block * 4"),
    Mutation("one block's scales", _FETCH, "uint64_t{block} * rooms.pitch + unit", "unit"),
    Mutation("a rank that missed another reads rooms", _FETCH, "if (!is_whole(meeting)) {", "if (false) {"),
    Mutation("results of the first rank", _MEET, "reinterpret_cast<uint64_t>(m.rooms[slot / max_tokens])", "reinterpret_cast<uint64_t>(m.rooms[0])"),
    Mutation("results of the first route", _FETCH, "place_of_result(meeting, token, route, ", "place_of_result(meeting, token, 0, "),
    Mutation("the first routes alone", _FETCH, "route < rooms.topk; route += kLanesOfRow", "route < rooms.topk && route < kLanesOfRow; route += kLanesOfRow"),
    Mutation("results where rows are", _FETCH, "hidden, rooms.results)", "hidden, 0)"),
    Mutation("addresses of the first product", _EPILOGUE, "rows.expect(p.second, tile, warpgroup * 64);", "rows.expect(p, tile, warpgroup * 64);"),
    Mutation("gate's and up's rows apart, where they are in turn", "params.cuh", "if constexpr (kGateColumns == 8) return column;", ""),
    Mutation("scales of 64 columns for both", _WORK, "return tile.is_second ? kScaleParts : 1;", "return kScaleParts;"),
    Mutation("bytes of all scales for both", "work/rows_of_tile.cuh", "(kScaleParts - scale_parts_of(tile)) * kScaleRows * 4;", "0;"),
    Mutation("parts of k-blocks in both products", "mainloop.cuh", "if (!tile.is_second) {", "if (false) {"),
    Mutation("whole k-blocks in both products", "mainloop.cuh", "if (!tile.is_second) {", "if (true) {"),
    Mutation("scales of gate and up in turn for both", "scales/by_halves.cuh", "kOfUnit == 1 ? kGateColumns : 128", "kGateColumns"),
    Mutation("weights of the first route", _FETCH, "rooms.weights_at + route * 4", "rooms.weights_at"),
    Mutation("weights of the first token", _FETCH, "room_row(token) + rooms.weights_at", "room_row(0) + rooms.weights_at"),
    Mutation("weights where rows are", _FETCH, "rooms.weights + unit.row_of_ring + of_unit", "rooms.weights + row"),
]  # fmt: skip
