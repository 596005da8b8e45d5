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
    RowsTwiceTrial(HIGH, (390,), 4, "slow_warps", intermediate=512, num_sms=4, lag=3, share=0.5),
    RowsTwiceTrial(HIGH, (390,), 5, "slow_lanes", num_sms=1),
]
_WORK, _EPILOGUE, _STORE, _SILU = (
    "work/rows_twice.cuh",
    "epilogue/silu_or_rows.cuh",
    "epilogue/store_rows.cuh",
    "epilogue/silu.cuh",
)
_COUNT = "  ptx::red_release_gpu_add_b32(&p.counts->whole[tile.block], 1);\n"
_WRITER = "DEVICE void count_written(const Params& p, const Tile& tile) {\n  ptx::fence_proxy_async_global();\n"
_READER = "  }\n  ptx::fence_proxy_async_global();\n"
MUTATIONS = [
    Mutation("a tile waits for no block", _WORK, "  if (!tile.is_second) return;\n", "  return;\n"),
    Mutation("a count that releases nothing", _WORK, _COUNT, "  ptx::atom_add(&p.counts->whole[tile.block], 1);\n"),
    Mutation("a read of the count that acquires nothing", _WORK, "ptx::ld_acquire_gpu_b32(&p.counts->whole", "ptx::ld_relaxed_gpu_b32(&p.counts->whole"),
    Mutation("no fence behind the stores", _WORK, _WRITER, _WRITER.partition("  ptx")[0]),
    Mutation("no fence ahead of the loads", _WORK, _READER, "  }\n"),
    Mutation("one part too few is waited for", _WORK, "[tile.block]) < parts)", "[tile.block]) + 1 < parts)"),
    Mutation("one part too many is waited for", _WORK, "[tile.block]) < parts)", "[tile.block]) < parts + 1)"),
    Mutation("the first warpgroup's parts alone", _WORK, "* (tile.row_m + 64 < tile.end_m ? 2 : 1);", "* 1;"),
    Mutation("parts of a whole block for each", _WORK, "(tile.row_m + 64 < tile.end_m ? 2 : 1)", "2"),
    Mutation("parts by columns of the second product", _WORK, "parts = ceil_div(p.n, kBlockN)", "parts = ceil_div(p.second.n, kBlockN)"),
    Mutation("no lag, where the first task that waits needs one", _WORK, ", lag = p.lag;", ", lag = 0;", shows_in=HIGH),
    Mutation("the second product's waves for the first's", _WORK, "second_among(wave + 1) > waves_of_second;", "second_among(wave + 1) == waves_of_second;"),
    Mutation("tiles of the lag twice", _WORK, "task - waves_of_second * ptx::grid_size()))", "behind_lag - waves_of_second * ptx::grid_size()))"),
    Mutation("each block has the first one's count", _WORK, "(wanted - found.number) / tiles_n + index.m;", "0;"),
    Mutation("each group begins with the count of the first", _WORK, "(wanted - found.number) / tiles_n + index.m;", "index.m;"),
    Mutation("blocks are not told", _WORK, "tile.row_n / kBlockN | tile.block << kColumnBits", "tile.row_n / kBlockN"),
    Mutation("all tiles are the first product's", _WORK, " | static_cast<uint32_t>(tile.is_second) << 31}", "}"),
    Mutation("depth of the first product for both", _WORK, "KBlocks(product_of(p, tile).k)", "KBlocks(p.k)"),
    Mutation("gates' rows for both", _WORK, "  if (tile.is_second) return column;\n", ""),
    Mutation("gate and up from one row on", _WORK, "(column % kTurn < kGateColumns ? 0 : p.n / 2)", "0"),
    Mutation("scales of gates for both", _WORK, "  if (tile.is_second) {\n    scales.row[0]", "  if (false) {\n    scales.row[0]"),
    Mutation("one scale for both blocks", _WORK, "(tile.row_n + kScaleRowsOfB < of.n ? of.sfb_stride_n : 0)", "0"),
    Mutation("groups' scales alike", _WORK, "(tile.is_second ? p.second_sfb_stride : p.groups.sfb_stride)", "p.groups.sfb_stride"),
    Mutation("rows that the tile above has are written twice", _SILU, "kToAddresses && row < tile.row_m + tile.stored_before ? tile.end_m : row", "row"),
    Mutation("rows that the tile above stores are not told", _WORK, "tile.group | tile.stored_before << kGroupBits | ", "tile.group | "),
    Mutation("tiles are counted before they are written", _EPILOGUE, "    first.store_tile(p, tile, total);\n    second.hand_over();\n", "    second.hand_over();\n    first.store_tile(p, tile, total);\n"),
    Mutation("a tile is handed over before all lanes have stored", _STORE, "    ptx::syncwarp();  // all lanes have stored\n", ""),
    Mutation("a tile is handed over while another is stored", _STORE, "  DEVICE void hand_over() {\n    wait_until_free();\n", "  DEVICE void hand_over() {\n"),
    Mutation("addresses of the first product", _EPILOGUE, "rows.expect(p.second, tile", "rows.expect(p, tile"),
    Mutation("columns of the first product", _EPILOGUE, "rows.store(p.second, ", "rows.store(p, "),
    Mutation("the last CTA leaves its counts", _WORK, "    ptx::st_global_b32(&p.counts->claimed, 0), ptx::st", "    ptx::st"),
    Mutation("the last CTA but one leaves zeros", _WORK, "+ 1 < ptx::grid_size()) return;", "+ 2 < ptx::grid_size()) return;"),
    Mutation("a count stays", _WORK, "block < p.blocks; ++block) ptx", "block + 1 < p.blocks; ++block) ptx"),
]  # fmt: skip
