"""Ways to break the kernel of both products of experts' rows, and the trials that must notice."""

from __future__ import annotations

from deep_gemm.across.rows_twice import config_for
from lab.sim.mutate import Mutation
from lab.sim.rows_twice import RowsTwiceTrial

LOW, HIGH = config_for(272, 256, band=1), config_for(256, 256, band=3)
TRIALS = [
    RowsTwiceTrial(LOW, (130, 0, 3, 64), 1, hidden=272, num_sms=3, lag=1),
    RowsTwiceTrial(LOW, (300, 65), 2, "late_stores", hidden=512, intermediate=128, num_sms=2, limit=0.5),
    RowsTwiceTrial(HIGH, (400, 1, 129), 3, "slow_cta", hidden=512, num_sms=4),
    RowsTwiceTrial(HIGH, (390,), 4, "slow_warps", intermediate=512, num_sms=4, lag=3),
    RowsTwiceTrial(HIGH, (390,), 5, "slow_lanes", num_sms=1, share=1.0),
    RowsTwiceTrial(LOW, (300, 70, 0, 129, 1), 6, hidden=512, num_sms=3, lag=4, slots=1),
    RowsTwiceTrial(LOW, (1, 300, 0, 70), 7, "slow_warps", num_sms=4, share=1.0, slots=1),
    RowsTwiceTrial(LOW, (500, 3), 8, "slow_cta", num_sms=2, share=0.0, slots=1),
    RowsTwiceTrial(LOW, (400,), 2, "slow_cta", hidden=1024, num_sms=6, slots=1),
    RowsTwiceTrial(LOW, (400,), 3, "slow_cta", hidden=1024, num_sms=6, share=0.75, slots=1),
    RowsTwiceTrial(HIGH, (1300, 5), 9, num_sms=2, slots=1),
    RowsTwiceTrial(LOW, (300, 70, 0, 129, 1), 3, hidden=512, num_sms=5, share=1.0, lag=4, slots=1),
]
_WORK, _EPILOGUE, _STORE, _SILU = (
    "work/rows_twice.cuh",
    "epilogue/silu_or_rows.cuh",
    "epilogue/store_rows.cuh",
    "epilogue/silu.cuh",
)
_COUNT = "  ptx::red_release_gpu_add_b32(count_of(p, Of::kWhole, tile.block), parts_of(tile));\n"
_WRITER = "DEVICE void count_written(const Params& p, const Tile& tile) {\n  ptx::fence_proxy_async_global();\n"
_SLOT = "  if (!tile.is_second && tile.block >= p.slots)\n"
_READ = """    ptx::mbarrier_wait_parity(&barriers.rows.ready[warpgroup], parity);
    if (tile.is_second && ptx::lane_index() == 0) count_read(p, tile);
"""
_READ_AHEAD = "".join(reversed(_READ.splitlines(keepends=True)))
_TAKEN = "    if constexpr (!kIsWarp) wait_for_operands(p, tile);\n"
_READER = "  if (tile.is_in_ring()) ptx::fence_proxy_async_global();\n"
MUTATIONS = [
    Mutation("a tile waits for no block", _WORK, "  if (tile.is_second) wait_for_count(", "  if (false) wait_for_count("),
    Mutation("a count that releases nothing", _WORK, _COUNT, "  ptx::atom_add(count_of(p, Of::kWhole, tile.block), parts_of(tile));\n"),
    Mutation("a read of the count that acquires nothing", _WORK, "while (ptx::ld_acquire_gpu_b32(", "while (ptx::ld_relaxed_gpu_b32("),
    Mutation("no fence behind the stores", _WORK, _WRITER, _WRITER.partition("  ptx")[0]),
    Mutation("no fence ahead of the loads", _WORK, _READER, ""),
    Mutation("one part too few is waited for", _WORK, "of, block)) < needed)", "of, block)) + 1 < needed)"),
    Mutation("one part too many is waited for", _WORK, "of, block)) < needed)", "of, block)) < needed + 1)"),
    Mutation("one part for each warpgroup, where one has no rows", _WORK, "kPartsOfTile / 2 : kPartsOfTile;", "kPartsOfTile / 2 : kPartsOfTile / 2;"),
    Mutation("each warpgroup counts for both", _WORK, "kPartsOfTile / 2 : kPartsOfTile;", "kPartsOfTile : kPartsOfTile;"),
    Mutation("parts by columns of the second product", _WORK, "kWhole, tile.block, ceil_div(p.n,", "kWhole, tile.block, ceil_div(p.second.n,"),
    Mutation("a tile waits for no slot", _WORK, _SLOT, "  if (false)\n"),
    Mutation("a slot is read by fewer columns", _WORK, "tile.block - p.slots, ceil_div(p.second.n, kBlockN)", "tile.block - p.slots, ceil_div(p.second.n / 2, kBlockN)"),
    Mutation("a slot is waited for by the block behind", _WORK, _SLOT, _SLOT.replace(">=", ">")),
    Mutation("a slot is read before it is multiplied", _EPILOGUE, _READ, _READ_AHEAD),
    Mutation("a slot is never read", _WORK, "count_of(p, Of::kRead, tile.block), parts_of(tile)", "count_of(p, Of::kRead, tile.block), 0"),
    Mutation("one count for both products", _WORK, "static_cast<uint32_t>(of) * p.blocks + block", "block"),
    Mutation("all CTAs are of the first role", _WORK, "return ptx::block_index() * of_second % ctas >= p.first_ctas;", "return false;"),
    Mutation("the first CTA is of the second role", _WORK, "return ptx::block_index() * of_second % ctas >= p.first_ctas;", "return ptx::block_index() * of_second % ctas < of_second;"),
    Mutation("a CTA whose tiles wait for slots claims tiles of the second product", _WORK, "ahead = kTileSlots - 1;", "ahead = 0;"),
    Mutation("a tile's place is free before it has its slot", _WORK, _TAKEN, ""),
    Mutation("tiles for all are computed twice", _WORK, "(tile.is_second ? 0 : p.lag) + claim(from)", "claim(from)"),
    Mutation("tiles of the second product behind `lag` alone", _WORK, "(tile.is_second ? 0 : p.lag) + claim(from)", "p.lag + claim(from)"),
    Mutation("all tiles of the first product are for all", _WORK, "is_found = wanted < p.lag && find", "is_found = find"),
    Mutation("all blocks have the first slot", _WORK, "block % p.slots * kBlockM;", "0;"),
    Mutation("each group begins with the first slot", _WORK, "tile.block = (wanted - found.number) / tiles_n + index.m;", "tile.block = index.m;"),
    Mutation("rows beside the slot of a tile that was moved up", _WORK, "row_of_slot - tile.stored_before;", "row_of_slot;"),
    Mutation("the second product's tiles are moved up", _WORK, "    if (!tile.is_in_ring()) move_up(", "    move_up("),
    Mutation("the middle's rows by where they lie in A", _SILU, "return first_row_of_d(tile) + ((is_stored ? tile.end_m : row) - tile.row_m);", "return is_stored ? tile.end_m : row;"),
    Mutation("addresses by where rows lie in the ring", _STORE, "uint64_t{first_row_of_d(tile) + row} * 8", "uint64_t{row_m} * 8"),
    Mutation("blocks are not told", _WORK, "tile.row_n / kBlockN | tile.block << kColumnBits", "tile.row_n / kBlockN"),
    Mutation("all tiles are the first product's", _WORK, " | static_cast<uint32_t>(tile.is_second) << 31}", "}"),
    Mutation("depth of the first product for both", _WORK, "KBlocks(product_of(p, tile).k);", "KBlocks(p.k);"),
    Mutation("gates' rows for both", _WORK, "  if (tile.is_second) return column;\n", ""),
    Mutation("gate and up from one row on", _WORK, "(column % kTurn < kGateColumns ? 0 : p.n / 2)", "0"),
    Mutation("scales of gates for both", _WORK, "  if (tile.is_second) {\n    scales.row[0]", "  if (false) {\n    scales.row[0]"),
    Mutation("one scale for both blocks", _WORK, "(tile.row_n + kScaleRowsOfB < of.n ? of.sfb_stride_n : 0)", "0"),
    Mutation("groups' scales alike", _WORK, "(tile.is_second ? p.second_sfb_stride : p.groups.sfb_stride)", "p.groups.sfb_stride"),
    Mutation("rows that the tile above has are written twice", _SILU, "is_stored = kToAddresses && row < tile.row_m + tile.stored_before;", "is_stored = false;"),
    Mutation("rows that the tile above stores are not told", _WORK, "tile.group | tile.stored_before << kGroupBits | ", "tile.group | "),
    Mutation("tiles are counted before they are written", _EPILOGUE, "    first.store_tile(p, tile, total);\n    second.hand_over();\n", "    second.hand_over();\n    first.store_tile(p, tile, total);\n"),
    Mutation("a tile is handed over before all lanes have stored", _STORE, "    ptx::syncwarp();  // all lanes have stored\n", ""),
    Mutation("a tile is handed over while another is stored", _STORE, "  DEVICE void hand_over() {\n    wait_until_free();\n", "  DEVICE void hand_over() {\n"),
    Mutation("addresses of the first product", _EPILOGUE, "!kFetchesRows && tile.is_second) rows.expect(p.second, tile", "!kFetchesRows && tile.is_second) rows.expect(p, tile"),
    Mutation("columns of the first product", _EPILOGUE, "rows.store(p.second, ", "rows.store(p, "),
    Mutation("the last CTA leaves its counts", _WORK, "sizeof(Counts) / 4 - 1 + ", "sizeof(Counts) / 4 - 2 + "),
    Mutation("the last CTA but one leaves zeros", _WORK, "(1 + kStoringWarps)) return;", "(1 + kStoringWarps) - 1) return;"),
]  # fmt: skip
