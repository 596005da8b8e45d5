"""Ways to break what fetches the rows of a product while it multiplies, and the trials they meet."""

from __future__ import annotations

from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds import epilogues, works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.mutate import Mutation
from lab.sim.rows_fetched import FetchTrial


def fetched(*, apart: bool) -> Output:
    return Output(work=works.FETCHED, epilogue=epilogues.SILU_OF_HALVES if apart else epilogues.SILU)


def config_of(tile: tuple[int, int] = (128, 256), k: int = 256, *, apart: bool = True) -> GemmConfig:
    return tile_config(*tile, fetched(apart=apart), k=k)


APART, LOW, IN_TURN = config_of(), config_of((64, 256), 128), config_of((128, 128), 384, apart=False)
TWO = (APART, (40, 23), 3, 4)
TRIALS = [
    FetchTrial(*TWO, 1),
    FetchTrial(*TWO, 2, "late_stores"),
    FetchTrial(*TWO, 3, "slow_lanes"),
    FetchTrial(*TWO, 4, "slow_warps", num_sms=3),
    FetchTrial(*TWO, 5, "late_loads"),
    FetchTrial(*TWO, 6, "slow_cta", num_sms=3),
    FetchTrial(LOW, (9, 0, 30), 2, 3, 7, k=128, more={"max_tokens": 33, "rank": 1}),
    FetchTrial(IN_TURN, (17, 20), 4, 3, 8, k=384, more={"limit": 0.5, "elsewhere": 0.6}),
    FetchTrial(config_of(k=6144), (6, 7), 3, 2, 9, "late_stores", k=6144),
    FetchTrial(APART, (3, 2), 32, 5, 10, n=512),
    FetchTrial(APART, (20, 20), 2, 3, 11, more={"has_missed": True}),
    *(FetchTrial(*TWO, seed, "slow_math") for seed in (12, 13)),
    FetchTrial(APART, (5, 5), 3, 2, 14, more={"elsewhere": 0.0}),
    FetchTrial(APART, (5, 6), 9, 3, 15),
    FetchTrial(APART, (33,), 3, 4, 16),
    FetchTrial(APART, (70, 60), 3, 4, 17, more={"elsewhere": 0.0}),
    FetchTrial(APART, (90, 60), 4, 3, 18, "slow_lanes", num_sms=3, more={"elsewhere": 0.1}),
    FetchTrial(APART, (100,), 3, 1, 19, "late_stores", more={"elsewhere": 0.0}),
    FetchTrial(APART, (60, 40), 3, 4, 20, more={"elsewhere": 0.2}),
]

_FETCH, _ROWS = "work/rows_fetched.cuh", "work/rows.cuh"
MUTATIONS = [
    Mutation("tiles are dealt before their rows have come", _FETCH, "arrivals_of(p, part)) != rows) {", "arrivals_of(p, part)) > rows) {"),
    Mutation("one row of a part is not waited for", _FETCH, "arrivals_of(p, part)) != rows) {", "arrivals_of(p, part)) + 1 < rows) {"),
    Mutation("the part of a tile's last rows is not waited for", _FETCH, "part * kRowsOfPart < end; ++part", "part * kRowsOfPart <= first; ++part"),
    Mutation("the first part alone is waited for", _FETCH, "part = first / kRowsOfPart; part * kRowsOfPart < end;", "part = 0; part < 1;"),
    Mutation("the last part is taken for a whole one", _FETCH, "left < kRowsOfPart ? left : kRowsOfPart", "kRowsOfPart"),
    Mutation("no part is taken for a whole one", _FETCH, "rows = left < kRowsOfPart ? left : kRowsOfPart", "rows = left"),
    Mutation("rows behind the group's are waited for", _ROWS, "end < tile.end_m ? end : tile.end_m", "end"),
    Mutation("nobody waits for rows", _ROWS, "      wait_for_rows(p, tile.row_m, end < tile.end_m ? end : tile.end_m);\n", ""),
    Mutation("a rank that missed another waits all the same", _FETCH, "  if (!is_whole(p.fetching.meeting)) return;\n", ""),
    Mutation("rows are announced before they are written", _FETCH, "    ptx::tma_store_wait<kNewer>();\n", "    ptx::tma_store_wait_read<kNewer>();\n"),
    Mutation("rows are announced when they are stored", _FETCH, "      settle<1>();\n      unwritten = ring.place, part = part_of_row;", "      settle<1>();\n      unwritten = ring.place, part = part_of_row;\n      settle<1>();"),
    Mutation("the last row is not announced", _FETCH, "    }\n    settle<0>();\n  }", "    }\n  }"),
    Mutation("one lane announces for all", _FETCH, "    if (part != kNoPart) ptx::red", "    if (part != kNoPart && lane == 0) ptx::red"),
    Mutation("a place is given back before it is read", _FETCH, "      const uint32_t part_of_row = store(slot);\n", "      if (lane == 0) ptx::mbarrier_arrive(&storage.free[ring.place]);\n      const uint32_t part_of_row = store(slot);\n"),
    Mutation("a place is never given back", _FETCH, "    if (lane == 0) ptx::mbarrier_arrive(&ring.storage.free[unwritten]);\n", ""),
    Mutation("a place is filled while it is in use", _FETCH, "    ptx::mbarrier_wait_parity(&storage.free[ring.place], ring.parity ^ 1);\n", ""),
    Mutation("a place is filled a turn too soon", _FETCH, "&storage.free[ring.place], ring.parity ^ 1", "&storage.free[ring.place], ring.parity"),
    Mutation("rows are stored before they have landed", _FETCH, "        ptx::mbarrier_wait_parity(landed, ring.parity);\n", ""),
    Mutation("places go on without turns", _FETCH, "    parity ^= place + 1 == length;\n", ""),
    Mutation("a place more than there is room for", _FETCH, "length(kFetchedBytes / row_bytes < kMostFetched ? kFetchedBytes / row_bytes : kMostFetched)", "length(kMostFetched)", shows_in=TRIALS[8].config.name),
    Mutation("each row of a slot fetches it", _FETCH, "+ j) < row;", "+ j) < 0;"),
    Mutation("a lane's half of the routes is not looked at", _FETCH, "    votes |= votes >> 2;\n", ""),
    Mutation("a lane's neighbour is not asked", _FETCH, "    votes |= votes >> 1;\n", ""),
    Mutation("routes past the first four are not looked at", _FETCH, "j < f.topk; j += kLanesOfRow)", "j < (f.topk < 4 ? f.topk : 4); j += kLanesOfRow)"),
    Mutation("rows are taken twice", _FETCH, "p.fetching.arrivals, kRowsAtOnce", "p.fetching.arrivals, kRowsAtOnce - 1"),
    Mutation("some rows are not taken", _FETCH, "p.fetching.arrivals, kRowsAtOnce", "p.fetching.arrivals, kRowsAtOnce + 1"),
    Mutation("rows past the last are looked for", _FETCH, "row < p.m ? ptx::ld_global_i32(p.fetching.token_of + row) : -1", "ptx::ld_global_i32(p.fetching.token_of + row)"),
    Mutation("another lane's slot", _FETCH, "ptx::shfl_sync(static_cast<uint32_t>(slot), lowest(left))", "ptx::shfl_sync(static_cast<uint32_t>(slot), lowest(left) + 4)"),
    Mutation("the storing warp is not told of the end", _FETCH, "    load(kNoSlot);\n", ""),
    Mutation("the slot is told behind its row", _FETCH, "    if (lane == 0) ptx::st_shared_b32(&storage.slots[ring.place], slot);\n", ""),
    Mutation("routes come behind the row", _FETCH, "    ptx::st_shared_b32(&storage.routes[ring.place][lane], row);\n", ""),
    Mutation("routes of the first slot", _FETCH, "f.row_of + uint64_t{slot} * f.topk + lane", "f.row_of + lane"),
    Mutation("the row's last bytes are not fetched", _FETCH, "row_of_slot(f.meeting, slot, f.max_tokens, f.row_bytes), f.row_bytes);", "row_of_slot(f.meeting, slot, f.max_tokens, f.row_bytes), f.row_bytes - 16);"),
    Mutation("values of the first row", _FETCH, "f.values + static_cast<uint64_t>(row) * p.k", "f.values"),
    Mutation("values over the next row's", _FETCH, "ring.row(), p.k);", "ring.row(), p.k + 16);"),
    Mutation("stores are never committed", _FETCH, "    ptx::tma_store_commit();\n", ""),
    Mutation("rows of routes without an expert", _FETCH, "    if (row >= 0) {\n      ptx::bulk_store", "    {\n      ptx::bulk_store"),
    Mutation("scales of one route alone", _FETCH, "for (uint32_t left = ptx::ballot_sync(row >= 0); left != 0; left &= left - 1)\n      lay", "for (uint32_t left = ptx::ballot_sync(row >= 0); left != 0; left = 0)\n      lay"),
    Mutation("scales of another route's row", _FETCH, "lay_scales(ptx::shfl_sync(static_cast<uint32_t>(row), lowest(left)));", "lay_scales(ptx::shfl_sync(static_cast<uint32_t>(row), lowest(left) + 1));"),
    Mutation("a rank that missed another lets one row's result go somewhere", _FETCH, "send_nowhere(f.addresses, p.m, ", "send_nowhere(f.addresses, p.m - 1, "),
    Mutation("all rows are of the first part", _FETCH, "row / kRowsOfPart : kNoPart", "0 : kNoPart"),
    Mutation("the part of the row before is told", _FETCH, "unwritten = ring.place, part = part_of_row;", "unwritten = ring.place;"),
    Mutation("scales of the first block", _FETCH, "ring.row() + p.k + block * 4", "ring.row() + p.k"),
    Mutation("scales of 32 blocks alone", _FETCH, "block < ceil_div(p.k, 128); block += 32", "block < ceil_div(p.k, 128) && block < 32; block += 32"),
    Mutation("scales of blocks lie over each other", _FETCH, "uint64_t{block} * p.fetching.pitch + row", "row"),
    Mutation("weights of the first route", _FETCH, "f.weights_at + lane * 4", "f.weights_at"),
    Mutation("results of the first route", _FETCH, "place_of_result(f.meeting, slot, lane, ", "place_of_result(f.meeting, slot, 0, "),
    Mutation("a rank that missed another fetches", _FETCH, "  if (!is_whole(f.meeting)) {\n", "  if (false) {\n"),
    Mutation("lanes that still read the place are not waited for", _FETCH, "    ptx::syncwarp();  // each lane has stored, and read the place\n", ""),
    Mutation("one role has no warp", _FETCH, "  if (warp == 3) RowStorer", "  if (warp == 4) RowStorer"),
]  # fmt: skip
