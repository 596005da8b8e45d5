"""Mistakes that were once made in kernels like fp8_gemm, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kinds.output import Output
from lab.sim.dense import DenseTrial as Trial
from lab.sim.mutate import Mutation

PLAIN = GemmConfig(128, 128, 3, panels_per_store=1, num_store_buffers=2)
RAGGED = tile_config(128, 112, Output(with_c=True), k=128)
TWO_UNITS = GemmConfig(256, 64, 3, panels_per_store=1, num_store_buffers=2)
ALONG_N = GemmConfig(128, 256, 2, unit_n=128, panels_per_store=1, num_store_buffers=1)
ADDING = tile_config(128, 64, Output(is_fp32=True, adds_to_d=True), k=128)
SHARES_A = GemmConfig(128, 64, 3, cluster_n=2, num_store_buffers=1)
SHARES_B = GemmConfig(128, 64, 3, cluster_m=2, num_store_buffers=1)
PAIRS = GemmConfig(128, 64, 5, num_partials=2, run_k_blocks=4, has_tail=True)
SPLITS = GemmConfig(128, 64, 3, cluster_k=3, num_partials=2, run_k_blocks=2, has_tail=True)
SPLITS_C = GemmConfig(64, 32, 3, 1, cluster_k=2, panel_columns=32, with_c=True)
BY_ROW = GemmConfig(128, 64, 3, sfb=PER_ROW, panel_columns=32, is_fp32=True)
KEEPING = GemmConfig(256, 32, 3, sfb=PER_ROW, panel_columns=32, is_fp32=True)

TRIALS = [
    *(Trial(PLAIN, 456, 392, 784, seed) for seed in (1, 2)),
    *(Trial(PLAIN, 456, 392, 784, 3, name) for name in ("late_loads", "late_stores", "slow_lanes", "slow_warps")),
    Trial(PLAIN, 136, 264, 4496, 4),
    Trial(PLAIN, 259, 136, 400, 4),
    Trial(PLAIN, 21, 136, 400, 21),
    Trial(SHARES_A, 21, 136, 400, 22),
    Trial(SHARES_A, 102, 136, 400, 22),
    *(Trial(RAGGED, 200, 336, 496, 5, name) for name in ("slow_producer", "slow_math")),
    Trial(RAGGED, 136, 328, 272, 5),
    Trial(TWO_UNITS, 520, 200, 656, 6),
    Trial(TWO_UNITS, 520, 200, 656, 6, "slow_warpgroup"),
    Trial(ALONG_N, 264, 520, 528, 7),
    *(Trial(ADDING, 264, n, 400, 8) for n in (196, 200)),
    *(Trial(SHARES_A, 264, 264, 784, seed) for seed in (9, 10)),
    *(Trial(SHARES_A, 264, 264, 784, 11, name) for name in ("slow_cta", "late_loads", "slow_warpgroup")),
    *(Trial(SHARES_B, 520, 136, 784, seed) for seed in (12, 13)),
    *(Trial(SHARES_B, 520, 136, 784, 14, name) for name in ("slow_cta", "late_loads", "even")),
    *(Trial(SHARES_B, 136, 136, 400, seed, "slow_warpgroup") for seed in (1, 2, 3)),
    *(Trial(PAIRS, 200, 136, 128 * 13 - 16, 15, name) for name in (None, "slow_math", "late_loads", "slow_warps")),
    Trial(PAIRS, 136, 72, 128 * 37, 16),
    *(Trial(SPLITS, 520, 72, 128 * 7 - 16, 17, name) for name in (None, "slow_cta", "slow_warps", "late_loads")),
    Trial(SPLITS, 136, 72, 128, 18),
    Trial(SPLITS_C, 264, 72, 128 * 5, 19, "slow_cta"),
    Trial(SPLITS_C, 264, 72, 128 * 70, 19),
    *(Trial(BY_ROW, 264, 136, 400, 20, name) for name in (None, "slow_lanes", "late_loads", "slow_warps")),
    *(Trial(KEEPING, 264, 136, 656, 23, name) for name in (None, "slow_lanes", "late_loads", "slow_warps")),
]

_GEMM, _MAINLOOP, _RING, _SLOT, _TILE = (f"{name}.cuh" for name in ("fp8_gemm", "mainloop", "ring", "slot", "tile"))
_WORK, _OPERAND = "work/dense.cuh", "operand.cuh"
_BY_BLOCK, _BLOCKS, _BY_ROW, _BY_ROW_KEPT, _ROWS_OF_B, _THREAD = (
    f"scales/{name}.cuh" for name in ("by_block", "blocks_of_b", "by_row", "by_row_kept", "rows_of_b", "thread")
)
_PANELS, _SPLIT, _STORE = (f"epilogue/{name}.cuh" for name in ("panels", "split", "store"))
_EXCHANGE = "exchange.cuh"
_WAIT_LOADED = "ptx::mbarrier_wait_parity(&ring.full[at.stage], at.parity);"
_WAIT_FREE = "ptx::mbarrier_wait_parity(&ring.empty[at.stage], at.parity ^ 1);"
_RELEASE = "release(ring, slots[k_block], ptx::lane_index(), loaded);"
_WAIT_WGMMA = "      if (i < kCount * kPieces) ptx::wgmma_wait_group<kLag>(); else ptx::wgmma_wait_group<0>();\n"
_PROXY_FENCE = "      ptx::fence_proxy_async_shared();"
_BAR = "      ptx::bar_sync(named_barrier, 128);\n"
_STORING = "      if (is_storing_thread) {\n"
_WAIT_READ = "      if (is_storing_thread) ptx::tma_store_wait_read<kNumStoreBuffers - 1>();\n"
_START = "if constexpr (kClusterSize > 1) ptx::cluster_sync(); else ptx::syncthreads();"
_AT_NEXT = "        at = at.next();\n"

MUTATIONS = [
    # Barriers: counts, parities, waits
    Mutation("empty expects one arrival", _RING, "= kMulticastCtas * kNumMathWarps;", "= 1;"),
    Mutation("empty expects one warp too many", _RING, "= kMulticastCtas * kNumMathWarps;", "= kMulticastCtas * kNumMathWarps + 1;"),
    Mutation("empty expects one warp too few", _RING, "= kMulticastCtas * kNumMathWarps;", "= kMulticastCtas * kNumMathWarps - 1;"),
    Mutation("empty forgets the other CTA", _RING, "= kMulticastCtas * kNumMathWarps;", "= kNumMathWarps;", shows_in=SHARES_A),
    Mutation("full expects two arrivals", _RING, "kFullArrivals = 1;", "kFullArrivals = 2;"),
    Mutation("producer waits for the other parity", _RING, _WAIT_FREE, _WAIT_FREE.replace(" ^ 1", "")),
    Mutation("consumer waits for the other parity", _RING, _WAIT_LOADED, _WAIT_LOADED.replace("parity)", "parity ^ 1)")),
    Mutation("consumer does not wait", _RING, _WAIT_LOADED, ""),
    Mutation("producer does not wait", _RING, _WAIT_FREE, ""),
    Mutation("parity never flips", _RING, "parity ^ static_cast<uint32_t>(wraps)", "parity"),
    Mutation("ring wraps one slot early", _RING, "stage + 1 == kNumStages", "stage + 2 == kNumStages", shows_in=SHARES_A),
    Mutation("bytes of rows that no box has", _OPERAND, "(!kAIsMnMajor && p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA)", "kBoxRowsOfA"),
    Mutation("bytes of rows that one CTA alone has", _OPERAND, "(!kAIsMnMajor && p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA) * kClusterN", "(!kAIsMnMajor && p.m < kBoxRowsOfA ? p.m : kBoxRowsOfA)", shows_in=SHARES_A),
    Mutation("bytes of scales that no box has", _OPERAND, "p.m < kBlockM ? ceil_div(p.m, 4) * 4 : kBlockM", "kBlockM"),
    Mutation("bytes of as many scales as rows", _OPERAND, "ceil_div(p.m, 4) * 4 : kBlockM", "p.m : kBlockM"),
    Mutation("all lanes release", _RING, "loaded, lane == 0);", "loaded, true);"),
    Mutation("release reaches this CTA alone", _RING, "lane % kMulticastCtas, loaded", "ptx::cluster_rank(), loaded", shows_in=SHARES_A),
    Mutation("barriers are not fenced", _RING, "    ptx::fence_mbarrier_init();\n", ""),
    Mutation("no barrier after the initialization", _GEMM, _START, ""),
    Mutation("a block's barrier where the cluster's is due", _GEMM, _START, "ptx::syncthreads();", shows_in=SHARES_A),
    Mutation("asks for the slot at hand instead of the next", _MAINLOOP, _AT_NEXT, ""),
    Mutation("takes an answer for the wrong parity", _MAINLOOP, "&ring.full[at.stage], at.parity)", "&ring.full[at.stage], at.parity ^ 1)"),
    Mutation("exits while the other CTA still arrives", _GEMM, "for (uint32_t i = 0; i < kNumStages; ++i, at = at.next()) wait_until_free(shared.ring, at);", "{}", shows_in=SHARES_A),
    # Loads
    Mutation("expects bytes without the scales", _SLOT, " + kScalesLoaded * 4;", ";"),
    Mutation("expects twice the bytes of B", _SLOT, "? 0 : kBBytes)", "? 0 : 2 * kBBytes)"),
    Mutation("multicasts to itself alone", _OPERAND, "kAllCtas);", "1u << ptx::cluster_rank());", everywhere=True, shows_in=SHARES_A),
    Mutation("half of an operand at the wrong rows", _OPERAND, "k, row + first, planes...);", "k, row, planes...);", shows_in=SHARES_A),
    Mutation("each CTA of a cluster loads the first half", _OPERAND, "ptx::cluster_rank() * kPart", "0", shows_in=SHARES_A),
    Mutation("half of an operand into the wrong slot rows", _OPERAND, "to + first * kLineBytes", "to", shows_in=SHARES_B),
    Mutation("scales of the next k-block", _OPERAND, "tile.row_m, k_block * kScaleParts,", "tile.row_m, k_block * kScaleParts + 1,"),
    Mutation("load coordinates swapped", _OPERAND, "k / kPackedB,\n                                                        tile.row_n + row,", "tile.row_n + row, k,"),
    # Products
    Mutation("no WGMMA fence", _MAINLOOP, "  ptx::wgmma_fence();\n", ""),
    Mutation("no commit", _MAINLOOP, "  ptx::wgmma_commit_group();\n", ""),
    Mutation("does not wait for the products", _MAINLOOP, _WAIT_WGMMA, ""),
    Mutation("waits for all products but one group", _MAINLOOP, "ptx::wgmma_wait_group<0>();", "ptx::wgmma_wait_group<1>();"),
    Mutation("k begins 32 bytes into the rows of A", _MAINLOOP, "(partial, a_low, b_low)", "(partial, a_low + 2, b_low)"),
    Mutation("slot released before its products are done", _MAINLOOP, _WAIT_WGMMA, "      if (done % kUnitsPerWarpgroup + 1 == kUnitsPerWarpgroup) { release(ring, slots[done / kUnitsPerWarpgroup], ptx::lane_index(), 0); }\n" + _WAIT_WGMMA),
    Mutation("slot released after the first unit", _BLOCKS, "if (piece + 1 == kPieces) release_slot(rows[1]);", "if (piece == 0) release_slot(rows[1]);", shows_in=TWO_UNITS),
    Mutation("slot released by every unit", _BLOCKS, "if (piece + 1 == kPieces) release_slot(rows[1]);", "release_slot(rows[1]);", shows_in=TWO_UNITS),
    Mutation("slot never released", _MAINLOOP, _RELEASE, ""),
    Mutation("a warpgroup's second unit of rows is the other's first", _MAINLOOP, "row_of_unit(unit) * (kBlockK / 16)", "unit / kUnitsAlongN * 64 * (kBlockK / 16)", shows_in=TWO_UNITS),
    Mutation("both warpgroups multiply the same rows", _MAINLOOP, "(first_a) + warpgroup * 64 * kBlockK", "(first_a)"),
    Mutation("units along n multiply the same columns", _MAINLOOP, " + column_of_unit(unit) * (kBlockK / 16) + low);", " + low);", shows_in=ALONG_N),
    # Scales
    Mutation("second row takes the first row's scale", _THREAD, "ptx::ld_shared_f32(sfa + 8);", "ptx::ld_shared_f32(sfa);"),
    Mutation("scales of all units from the first", _BLOCKS, " + row_of_unit(unit_of_piece<kOfUnit>(piece)),", ",", shows_in=TWO_UNITS),
    Mutation("scales read after the release", _MAINLOOP, _RELEASE, _RELEASE + " scales.load_ahead(slots[k_block].stage, k_block, piece);"),
    Mutation("scale of B from the next block of k", _BLOCKS, "ptx::shfl_sync(current[i], k_block_of_32)", "ptx::shfl_sync(current[i], k_block_of_32 + 1)"),
    Mutation("scales of B past the 32nd block not renewed", _BLOCKS, "      current[i] = coming[i];\n", "      if (first_k_block == 0) current[i] = coming[i];\n"),
    Mutation("scales of B read past the last k-block", _BLOCKS, "(k_block < end_k_block ? k_block : end_k_block - 1)", "(k_block)"),
    Mutation("scales of B read past the last block of n", _BY_BLOCK, "row_n / kScaleRowsOfB + i < last_block ? row_n / kScaleRowsOfB + i : last_block", "row_n / kScaleRowsOfB + i", shows_in=ALONG_N),
    Mutation("second block of B never used", _BY_BLOCK, "first_column + column >= i * kScaleRowsOfB ?", "first_column + column >= i * 1024 ?", shows_in=RAGGED),
    Mutation("tile's offset in its block of B forgotten", _BY_BLOCK, "end_k_block_, row_n % kScaleRowsOfB)", "end_k_block_, 0)", shows_in=RAGGED),
    Mutation("rows of a pair swapped in the promotion", _BLOCKS, "scale[i / 2 % 2]", "scale[i % 2]"),
    Mutation("scales by row of the next columns", _ROWS_OF_B, "scales_of_columns(column);", "scales_of_columns((column + 8) % kUnitN);", shows_in=BY_ROW),
    Mutation("scales by row of the first slot", _BY_ROW, "in_first_slot.sfb + stage * kScales + line", "in_first_slot.sfb + line", shows_in=BY_ROW),
    Mutation("kept scales by row of the first slot", _BY_ROW_KEPT, "return scales + stage * kScales + index;", "return scales + index;", shows_in=KEEPING),
    Mutation("scales of A of the first unit beside kept ones", _BY_ROW_KEPT, "of_slot(in_first_slot.sfa, row_of_unit(u))", "of_slot(in_first_slot.sfa, 0)", shows_in=KEEPING),
    Mutation("kept scales by row of the first columns", _BY_ROW_KEPT, "return sfb[k_block][column / 8];", "return sfb[k_block][0];", shows_in=KEEPING),
    Mutation("slot released after the first unit beside kept scales", _BY_ROW_KEPT, "if (unit + 1 == kUnits) release_slot(rows[1]);", "if (unit == 0) release_slot(rows[1]);", shows_in=KEEPING),
    Mutation("scales of B of the CTA's first tile", _GEMM, "if (is_tile) begin_scales", "if (is_tile && !share.is_any) begin_scales"),
    Mutation("a share without k-blocks asks for scales of B", _MAINLOOP, "if (!k_blocks.are_none()) scales_of_b", "scales_of_b", shows_in=SPLITS),
    Mutation("totals stored where the next tile is", _GEMM, "output.store_tile(p, done, units);", "output.store_tile(p, tile, units);"),
    Mutation("slot given back before all lanes have read its scales", _BY_ROW, "      ptx::syncwarp();", "", shows_in=BY_ROW),
    Mutation("the last tile moved up too far", _TILE, "ceil_div(rows - height, 4) * 4 : 0", "(rows - height) / 4 * 4 : 0"),
    Mutation("the last tile moved to where TMA cannot load scales", _TILE, "ceil_div(rows - height, 4) * 4 : 0", "rows - height : 0"),
    Mutation("the last tile moved up where C is added", _TILE, "if constexpr (!kWithC && !kAddsToD && !kAIsMnMajor) move_up", "move_up"),
    Mutation("scales by row of another tile", _OPERAND, "* kScaleRows, tile.row_n, k_block", "* kScaleRows, 0, k_block", shows_in=BY_ROW),
    # Runs and pairs of partial sums
    Mutation("waits for the piece that runs, not for the one before", _MAINLOOP, "ptx::wgmma_wait_group<kLag>();", "ptx::wgmma_wait_group<kLag + 1>();", shows_in=PAIRS),
    Mutation("one set of partial sums for both pieces", _MAINLOOP, "issue_piece<kOfUnit>(partial[i % kNumPartials]", "issue_piece<kOfUnit>(partial[0]", shows_in=PAIRS),
    Mutation("promotes the set that is being filled", _MAINLOOP, "promote(total[unit_of_piece<kOfUnit>(piece)], partial[done % kNumPartials]", "promote(total[unit_of_piece<kOfUnit>(piece)], partial[i % kNumPartials]", shows_in=PAIRS),
    Mutation("releases the slot at hand for the one before", _MAINLOOP, _RELEASE, _RELEASE.replace("slots[k_block]", "at"), shows_in=PAIRS),
    Mutation("scale of B of the run's first block for all", _MAINLOOP, "begin_k_block(k_block, k_block_of_32 + k_block);", "begin_k_block(k_block, k_block_of_32);", shows_in=PAIRS),
    Mutation("tail of the blocks forgotten", _MAINLOOP, "    for (; k_block < count; ++k_block)\n", "    for (; k_block + 1 < count; ++k_block)\n", shows_in=PAIRS),
    Mutation("last run forgotten", _MAINLOOP, "ptx::opaque(count / kRunKBlocks * kRunKBlocks)", "ptx::opaque((count - 1) / kRunKBlocks * kRunKBlocks)", shows_in=PLAIN),
    # A split of k
    Mutation("shares of k overlap", _TILE, "first = runs * rank / kClusterK * kRunKBlocks;", "first = (rank == 0 ? 0 : runs * rank / kClusterK - 1) * kRunKBlocks;", shows_in=SPLITS),
    Mutation("last share of k cut short", _TILE, "end = end_of_share < end ? end_of_share : end;", "end = end_of_share < end ? end_of_share : end - 1;", shows_in=SPLITS),
    Mutation("share of k past its end", _TILE, "end = end_of_share < end ? end_of_share : end;", "end = end_of_share;", shows_in=SPLITS),
    Mutation("chunks sent before the last tile's are consumed", _SPLIT, "    ptx::mbarrier_wait_parity(&barriers.consumed, parity ^ 1);\n", "", shows_in=SPLITS),
    Mutation("consumed told before all warps have read", _SPLIT, "    ptx::bar_sync(1, kNumMathWarps * 32);\n", "", shows_in=SPLITS),
    Mutation("consumed told to this CTA alone", _SPLIT, "ptx::mbarrier_arrive_cluster(&barriers.consumed, lane);", "ptx::mbarrier_arrive_cluster(&barriers.consumed, rank);", shows_in=SPLITS),
    Mutation("consumed expects one CTA", _SPLIT, "ptx::mbarrier_init(&consumed, kClusterK);", "ptx::mbarrier_init(&consumed, 1);", shows_in=SPLITS),
    Mutation("the exchange's parity never flips", _SPLIT, "    parity ^= 1;\n", "", shows_in=SPLITS),
    Mutation("sums read before they came", _SPLIT, "    ptx::mbarrier_wait_parity_cluster(&barriers.received, parity);\n", "", shows_in=SPLITS),
    Mutation("a CTA ends before the others told it all", _SPLIT, "DEVICE void leave() { ptx::cluster_sync(); }", "DEVICE void leave() {}", shows_in=SPLITS),
    Mutation("sums stored at the sender's rows", _SPLIT, "owner / 4 * 64 +", "", shows_in=SPLITS),
    Mutation("sums of units stored at the first unit's columns", _SPLIT, "column_of_unit(unit) + quad * 8, p.m", "quad % 4 * 8, p.m", shows_in=SPLITS),
    Mutation("a part counted twice", _EXCHANGE, "sum.x += addend.x,", "sum.x += 2 * addend.x,", shows_in=SPLITS_C),
    Mutation("promotion replaces the total", _BLOCKS, "scale[i / 2 % 2], total[i]);", "scale[i / 2 % 2], 0.f);"),
    # Tiles
    Mutation("tiles of m rounded down", _TILE, "ceil_div(ceil_div(m, kBlockM), kClusterM)", "(m / kBlockM / kClusterM)"),
    Mutation("last tile skipped", _WORK, "next_tile >= tiles_m * tiles_n", "next_tile + 1 >= tiles_m * tiles_n"),
    Mutation("every CTA takes all tiles after its first", _TILE, "next_tile += ptx::grid_size() / kClusterSize;", "next_tile += 1;", shows_in=ADDING),
    Mutation("clusters count as CTAs", _TILE, "ptx::block_index() / kClusterSize)", "ptx::block_index())", shows_in=SHARES_A),
    Mutation("both CTAs of a cluster take the same rows", _TILE, "tile_of_cta<kClusterM>(index.m)", "index.m * kClusterM", shows_in=SHARES_B),
    # Stores
    Mutation("no fence before TMA reads", _STORE, _PROXY_FENCE, ""),
    Mutation("the storing thread alone fences", _STORE, _PROXY_FENCE, "      if (is_storing_thread) ptx::fence_proxy_async_shared();"),
    Mutation("no barrier before TMA reads", _STORE, _BAR + _STORING, _STORING),
    Mutation("no barrier before the buffer is written", _STORE, _WAIT_READ + _BAR, _WAIT_READ),
    Mutation("buffer written while TMA reads it", _STORE, _WAIT_READ, ""),
    Mutation("waits for one store too few", _STORE, "tma_store_wait_read<kNumStoreBuffers - 1>", "tma_store_wait_read<kNumStoreBuffers>"),
    Mutation("stores never committed", _STORE, "        ptx::tma_store_commit();\n", ""),
    Mutation("both warpgroups on one named barrier", _STORE, "named_barrier = 1 + warpgroup;", "named_barrier = 1;"),
    Mutation("panels not swizzled", _PANELS, "return offset ^ (offset >> 3 & (bytes() - 16));", "return offset;"),
    Mutation("swizzle of half the span", _PANELS, "(bytes() - 16));", "(bytes() / 2 - 16));"),
    Mutation("stmatrix lanes of the wrong matrix", _PANELS, "column + lane / 16 * 8) * 2", "column + lane / 8 % 2 * 8) * 2"),
    Mutation("store coordinates swapped", "epilogue/to_matrix.cuh", "store_panel(&p.map_d, panel, column, row);", "store_panel(&p.map_d, panel, row, column);"),
    Mutation("units of m stored over each other", _STORE, "d_row = row_m + row_of_unit(unit);", "d_row = row_m;", shows_in=TWO_UNITS),
    Mutation("exits while TMA reads its shared memory", _STORE, "void finish() {\n    if (ptx::warp_index() % 4 == 0 && ptx::lane_index() == 0) ptx::tma_store_wait_read<0>();\n", "void finish() {\n"),
    Mutation("C of rows outside D is read", _STORE, "if (row_m >= m || columns_left == 0) continue;", "if (columns_left == 0) continue;", shows_in=RAGGED),
    Mutation("C of columns outside D is read", _STORE, "(i * 8 < columns_left ? i * 8 * kCBytes : 0)", "(i * 8 * kCBytes)", shows_in=RAGGED),
    Mutation("C of the upper rows added twice", _STORE, "const uint32_t row_m = row + half * 8 + lane / 4;\n    if (row_m >= m || columns", "const uint32_t row_m = row + lane / 4;\n    if (row_m >= m || columns", shows_in=RAGGED),
    Mutation("stores where it should add", _PANELS, "ptx::tma_reduce_add_3d(", "ptx::tma_store_3d(", shows_in=ADDING),
    Mutation("spans of D counted as columns", _PANELS, "return column >> log2_columns;", "return column;", shows_in=ADDING),
    Mutation("a span wider than n allows", _PANELS, "n & 4 ? 2 : n & 8", "n & 8", shows_in=ADDING),
    # Registers
    Mutation("more registers than the launch has", _GEMM, "setmaxnreg_dec<kProducerRegisters>", "setmaxnreg_dec<kProducerRegisters + 64>"),
    Mutation("one warp alone gives up registers", _GEMM, "    ptx::setmaxnreg_dec<kProducerRegisters>();", "    if (ptx::warp_index() % 4 == 0) ptx::setmaxnreg_dec<kProducerRegisters>();"),
]  # fmt: skip
