"""Ways to break two products beside each other, and the trials that must notice."""

from __future__ import annotations

from deep_gemm.across.rows_to_addresses import OUTPUT, OUTPUT_BY_64
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds.epilogues import SILU, SILU_OF_HALVES
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.kinds.works import ENDS
from lab.sim.beside import BesideTrial
from lab.sim.mutate import Mutation

IN_TURN, APART = (Output(work=ENDS, epilogue=each) for each in (SILU, SILU_OF_HALVES))
NARROW, WIDE = (tile_config(128, columns, IN_TURN, k=256) for columns in (128, 256))
LOW, OF_HALVES = tile_config(64, 128, IN_TURN, k=256), tile_config(64, 256, APART, k=256)
BY_64, BY_128 = (tile_config(128, 32, each, k=128) for each in (OUTPUT_BY_64, OUTPUT))
TRIALS = [
    BesideTrial(BY_64, 72, 128, 3, "slow_lanes", (70, 0, 3, 129, 1), 3, first=NARROW),
    BesideTrial(BY_64, 72, 128, 4, "late_stores", (70, 0, 3, 129, 1), 3, first=NARROW),
    BesideTrial(BY_64, 72, 128, 6, "slow_lanes", (140, 5), 3, first=WIDE, num_sms=3),
    BesideTrial(BY_64, 72, 128, 6, None, (190, 70), 3, first=LOW),
    BesideTrial(BY_64, 80, 128, 7, None, (1, 129), 9, first=LOW, num_sms=2, sms_of_first=1),
    BesideTrial(BY_128, 72, 128, 7, "slow_warps", (130, 70), 3, first=OF_HALVES),
    BesideTrial(BY_64, 264, 128, 23, "slow_lanes", (129,), 3, first=NARROW, sms_of_first=1),
]
_BESIDE, _SILU, _WORK = "work/tile_queue.cuh", "epilogue/silu.cuh", "work/rows.cuh"
MUTATIONS = [
    Mutation("counts release nothing", _SILU, "ptx::red_release_gpu_add_b32(count, ", "ptx::atom_add(count, "),
    Mutation("a lane counts ahead of the others' stores", _SILU, "    ptx::syncwarp();  // all lanes have stored\n", ""),
    Mutation("counts are read without acquire", _BESIDE, "ld_acquire_gpu_b32(count)", "ld_relaxed_gpu_b32(count)"),
    Mutation("TMA reads without a fence", _WORK, "ptx::fence_proxy_async_global();", ";"),
    Mutation("a warp too few", _BESIDE, "< needed)", "+ 2 < needed)"),
    Mutation("64 rows of a block are enough", _BESIDE, " * ceil_div(rows < b.block_rows ? rows : b.block_rows, 64);", ";"),
    Mutation("the first block of a tile alone", _BESIDE, "= last_row / b.block_rows;", "= from / b.block_rows;"),
    Mutation("a block that is stored again counts as stored", _BESIDE, "    if (end_block + 1 == last && rows % b.block_rows != 0) end_block = last;\n", ""),
    Mutation("groups share counts", _BESIDE, "+ first_row / block_rows + group;", "+ first_row / block_rows;"),
    Mutation("a tile counts where it begins", _SILU, "tile.row_m + tile.stored_before,", "tile.row_m,"),
    Mutation("halves count as whole tiles", _SILU, "tile.is_narrow ? 1 : 2", "2"),
    Mutation("all CTAs take the first tiles", _BESIDE, "ptx::atom_add(p.beside.next_tile, 1)", "ptx::ld_relaxed_gpu_b32(p.beside.next_tile)"),
]  # fmt: skip
