"""Mistakes in the code that only BF16 kernels have, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.gemm.config.bf16 import Bf16Config, bf16_config
from deep_gemm.gemm.config.tall import Majors
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.epilogues import SILU_IN_BF16
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.kinds.works import MOST_COUNTED
from lab.sim.bf16 import Bf16Trial as Trial
from lab.sim.bf16_counted import Bf16CountedTrial
from lab.sim.bf16_depths import Bf16DepthsTrial
from lab.sim.bf16_rows import Bf16RowsTrial
from lab.sim.mutate import Mutation

TN = Majors(True, True)
ALONG_K = Output(is_fp32=True, with_c=True, work=works.PARTS)
PLAIN = Bf16Config(128, 64, 3, panels_per_store=1)
UNITS = Bf16Config(256, 32, 3, panel_columns=32)
TURNED = Bf16Config(128, 128, 3, majors=TN)
SHARES_B = Bf16Config(128, 128, 3, cluster_m=2, majors=TN)
SPLITS = Bf16Config(64, 32, 3, 1, panel_columns=32, cluster_k=3, slices=3)
SPLITS_C = Bf16Config(128, 32, 3, panel_columns=32, cluster_k=2, slices=2, with_c=True)
SLICES = Bf16Config(64, 32, 3, 1, panel_columns=32, slices=3)
WIDE_SLICES = bf16_config(64, 256, Output(), slices=2)
DEPTHS = bf16_config(64, 64, ALONG_K, TN)
ADDING = bf16_config(64, 64, Output(is_fp32=True, adds_to_d=True, work=works.PARTS), TN)
BY_COUNTS = Output(is_fp32=True, with_c=True, work=works.COUNTED)
COUNTED = bf16_config(64, 64, BY_COUNTS, TN)
COUNTED_PAIRS = bf16_config(128, 64, BY_COUNTS, TN, cluster_n=2)
COUNTED_ADDING = bf16_config(64, 64, Output(is_fp32=True, adds_to_d=True, work=works.COUNTED), TN)
PAIRS = bf16_config(128, 64, ALONG_K, TN, cluster_n=2)
WIDE = bf16_config(64, 64, Output(work=works.ENDS), Majors(b_is_mn=True))
KS = (100, 0, 203, 64, 100)
OF_SILU = Output(work=works.ENDS, epilogue=SILU_IN_BF16)
ACTIVATED, NARROW = bf16_config(64, 256, OF_SILU), bf16_config(128, 128, OF_SILU)

TRIALS = [
    *(Trial(PLAIN, 200, 136, 456, 1, name) for name in (None, "late_loads", "slow_warps", "slow_math")),
    Trial(UNITS, 264, 40, 328, 2),
    Trial(UNITS, 264, 40, 328, 2, "late_loads"),
    Trial(TURNED, 132, 136, 200, 3),
    Trial(TURNED, 20, 136, 200, 3),
    *(Trial(SHARES_B, 264, 136, 456, 4, name) for name in (None, "slow_cta", "late_loads", "slow_warpgroup")),
    *(Trial(SLICES, 70, 40, 520, 5, name) for name in (None, "slow_math")),
    *(Trial(WIDE_SLICES, 200, 264, 328, 5, name, num_sms=2) for name in (None, "late_stores", "slow_warps")),
    *(Trial(SPLITS, 70, 40, 520, 9, name) for name in (None, "slow_cta", "slow_warps", "late_stores")),
    Trial(SPLITS_C, 140, 72, 264, 9),
    *(Bf16DepthsTrial(config, (128, 0, 256, 64), 136, 72, 6) for config in (DEPTHS, ADDING)),
    Bf16DepthsTrial(PAIRS, (192, 0, 384, 64), 136, 136, 7),
    *(Bf16CountedTrial(config, KS, 136, 72, 6) for config in (COUNTED, COUNTED_ADDING)),
    Bf16CountedTrial(COUNTED, KS, 136, 72, 6, on_gpu_alone=False),
    *(Bf16CountedTrial(COUNTED, KS, 136, 72, 6, name) for name in ("slow_math", "slow_warps")),
    Bf16CountedTrial(COUNTED, tuple(i % 3 for i in range(MOST_COUNTED + 5)), 8, 8, 6),
    Bf16CountedTrial(COUNTED, (70, 0, 30, 0), 72, 72, 6, told=(70, -5, 1000, 2**31 - 1)),
    Bf16CountedTrial(COUNTED_PAIRS, KS, 136, 136, 7, "slow_cta"),
    Bf16RowsTrial(WIDE, (70, 128, 198), 8, n=136, k=200),
]

_OPERAND, _SLICE, _RING, _SLOT = "operand.cuh", "slice.cuh", "ring.cuh", "slot.cuh"
_OF_SLICE, _OF_SLICES = "mainloop_of_slice.cuh", "mainloop_of_slices.cuh"
_GEMM, _ONCE, _STORE = "fp8_gemm.cuh", "epilogue/split_once.cuh", "epilogue/store.cuh"
_PARTS, _TILE, _OF_TILE, _COUNTED = "work/k_parts.cuh", "tile.cuh", "work/rows_of_tile.cuh", "work/k_counted.cuh"
_ACTIVATED, _GATES = "epilogue/activated.cuh", "params.cuh"
_LAST = "    if (i != 0) release(ring, last, ptx::lane_index());\n"

MUTATIONS = [
    # Loads
    Mutation("an MN-major box behind itself", _OPERAND, "to + i * kLineBytes, row + i", "to, row + i", shows_in=TURNED),
    Mutation("the first MN-major box again", _OPERAND, "kLineBytes, row + i, k, planes", "kLineBytes, row, k, planes", shows_in=TURNED),
    Mutation("every other MN-major box", _OPERAND, "i < kRows; i += 64", "i < kRows; i += 128", shows_in=TURNED),
    Mutation("MN-major coordinates swapped", _OPERAND, "row + i, k, planes...);", "k, row + i, planes...);", shows_in=TURNED),
    Mutation("bytes of rows that an MN-major box has not", _OPERAND, "!kAIsMnMajor && p.m < kBoxRowsOfA", "p.m < kBoxRowsOfA", shows_in=TURNED),
    Mutation("an MN-major box that begins anywhere", _TILE, " && !kAIsMnMajor) move_up", ") move_up", shows_in=TURNED),
    Mutation("bytes of scales that there are not", _SLOT, "kHasScales ? kScaleParts * kScaleRows + (kSfbIsPerRow ? kScalePartsOfB * kBlockN : 0) : 0", "32", shows_in=PLAIN),
    Mutation("B of the first group", _OF_TILE, "row_of_b(p, tile, tile.row_n + row), tile.group);", "row_of_b(p, tile, tile.row_n + row), 0);", shows_in=WIDE),
    # Products
    Mutation("the next 64 rows at the wrong place", _SLICE, "mn_major_descriptor_low(address, kBytesOf64Rows)", "mn_major_descriptor_low(address, 1024)", shows_in=TURNED),
    Mutation("an MN-major operand described as K-major", _SLICE, "return kIsMnMajor ?", "return kIsMnMajor && !kBIsMnMajor ?", shows_in=TURNED),
    Mutation("both warpgroups multiply the same rows", _SLICE, "(first_a) + warpgroup * kBytesOf64Rows", "(first_a)", shows_in=PLAIN),
    Mutation("the second unit multiplies the other warpgroup's rows", _SLICE, "row_of_unit(unit) * (kLineBytes / 16)", "row_of_unit(unit) / 2 * (kLineBytes / 16)", shows_in=UNITS),
    Mutation("A of the first slot", _SLICE, "operands.a + at.stage * (kABytes / 16)", "operands.a", shows_in=PLAIN),
    Mutation("B of the first slot", _SLICE, "operands.b + at.stage * (kBBytes / 16)", "operands.b", shows_in=PLAIN),
    Mutation("sums from where the last tile's were", _SLICE, ", i != 0);", ", true);", shows_in=PLAIN),
    Mutation("each k-block from zero", _SLICE, ", i != 0);", ", false);", shows_in=PLAIN),
    Mutation("no WGMMA fence", _SLICE, "    ptx::wgmma_fence();\n", "", shows_in=PLAIN),
    Mutation("no commit", _SLICE, "    ptx::wgmma_commit_group();\n", "", shows_in=PLAIN),
    Mutation("does not wait for the slot", _SLICE, "    wait_until_loaded(ring, at);\n", "", shows_in=PLAIN),
    Mutation("slots given back before they are multiplied", _SLICE, "ptx::wgmma_wait_group<1>();", "ptx::wgmma_wait_group<2>();", shows_in=PLAIN),
    Mutation("the slot at hand given back for the last", _SLICE, _LAST, _LAST.replace("last,", "at,"), shows_in=PLAIN),
    Mutation("slots never given back", _SLICE, _LAST, "", shows_in=PLAIN),
    Mutation("sums read while products run", _SLICE, "ptx::wgmma_wait_group<0>();", "ptx::wgmma_wait_group<1>();", shows_in=PLAIN),
    Mutation("the last slot kept", _SLICE, "  if (count != 0) release(ring, last, ptx::lane_index());\n", "", shows_in=PLAIN),
    Mutation("a slot of none given back", _SLICE, "  if (count != 0) release(", "  release(", shows_in=DEPTHS),
    Mutation("released in this CTA alone", _RING, "&ring.empty[at.stage], lane);", "&ring.empty[at.stage], ptx::cluster_rank());", shows_in=SHARES_B),
    # Slices
    Mutation("the last slice left out", _OF_SLICES, "slice < kSlices; ++slice", "slice + 1 < kSlices; ++slice", shows_in=SLICES),
    Mutation("slices begin a block late", _OF_SLICES, "first = k_blocks * slice / kSlices,", "first = k_blocks * slice / kSlices + 1,", shows_in=SLICES),
    Mutation("the last slice's sums alone", _OF_SLICES, "ptx::add_rn(total[unit][i], sum[unit][i])", "sum[unit][i]", shows_in=SLICES),
    Mutation("sums of the slices before forgotten", _OF_SLICES, "if (first != 0) before.add_to(total);", "", shows_in=WIDE_SLICES),
    Mutation("sums in registers forgotten", _OF_SLICES, "add(total[i / kColumns][i % kColumns], kept[i]);", ";", shows_in=WIDE_SLICES),
    Mutation("one place for the sums of all threads", _OF_SLICES, " + ptx::thread_index() % 128 * 16;", ";", shows_in=WIDE_SLICES),
    Mutation("sums over panels that TMA reads", _STORE, "ptx::tma_store_wait_read<0>();\n    ptx::bar_sync(1 + warpgroup, 128);\n    return", "{}\n    ptx::bar_sync(1 + warpgroup, 128);\n    return", shows_in=WIDE_SLICES),
    Mutation("sums over panels that one thread alone knows to be read", _STORE, "    ptx::bar_sync(1 + warpgroup, 128);\n    return", "    return", shows_in=WIDE_SLICES),
    Mutation("sums of none not zero", _OF_SLICE, "kWithC || kMayBeEmpty", "false", shows_in=DEPTHS),
    # Splits
    Mutation("CTAs do not wait until others run", _ONCE, "    ptx::cluster_wait();  // all", "    // all", shows_in=SPLITS),
    Mutation("CTAs do not say that they run", _GEMM, ", ptx::cluster_arrive_relaxed();", ";", shows_in=SPLITS),
    Mutation("a block's barriers not initialized", _GEMM, "if constexpr (kStartsAlone) ptx::syncthreads(), ", "if constexpr (kStartsAlone) ", shows_in=SPLITS),
    Mutation("sums of all rows expected", _ONCE, "kClusterK * own_quads * warps * kChunkFloats * 4", "kClusterK * own_quads * kNumMathWarps * kChunkFloats * 4", shows_in=SPLITS),
    Mutation("sums of the last rows not sent", _ONCE, "used = ceil_div(p.m - tile.row_m, 16)", "used = (p.m - tile.row_m) / 16", shows_in=SPLITS),
    Mutation("sums of as many columns for all", _ONCE, "rank < kQuads ? ceil_div(kQuads - rank, kClusterK) : 0", "kQuadsPerCta", shows_in=SPLITS),
    Mutation("sums read before they came", _ONCE, "    ptx::mbarrier_wait_parity_cluster(received, 0);\n", "", shows_in=SPLITS),
    Mutation("all CTAs' sums in the first one's place", _ONCE, "exchange + place(rank, quad", "exchange + place(0, quad", shows_in=SPLITS),
    Mutation("all columns to one CTA", _ONCE, "received, quad % kClusterK, v[0]", "received, 0, v[0]", shows_in=SPLITS),
    Mutation("the last CTA's sums left out", _ONCE, "sender < kClusterK; ++sender", "sender + 1 < kClusterK; ++sender", shows_in=SPLITS),
    Mutation("stored at the sender's rows", _ONCE, "tile.row_m + owner * 16", "tile.row_m + warp * 16", shows_in=SPLITS_C),
    Mutation("stored in the order of CTAs", _ONCE, "(quad_of_cta * kClusterK + rank) * 8", "(rank * kQuadsPerCta + quad_of_cta) * 8", shows_in=SPLITS),
    # Groups along k, by depths of the host
    Mutation("the last group left out", _PARTS, "tiles_of_part * parts.count) return false", "tiles_of_part * (parts.count - 1)) return false", shows_in=DEPTHS),
    Mutation("groups without depth still added", _PARTS, "if (kAddsToD && parts.num_k_blocks[tile.part] == 0) return false;", "if (kAddsToD && parts.num_k_blocks[tile.part] != 0) return false;", shows_in=ADDING),
    Mutation("tiles counted through all groups", _PARTS, "take(tile, next_tile - tile.part * tiles_of_part)", "take(tile, next_tile)", shows_in=DEPTHS),
    Mutation("tiles of n rounded down", _TILE, "ceil_div(ceil_div(n, kBlockN), kClusterN)", "(n / kBlockN)", shows_in=DEPTHS),
    Mutation("both CTAs take the same columns", _TILE, "tile_of_cta<kClusterN>(index.n)", "index.n * kClusterN", shows_in=PAIRS),
    Mutation("all groups from the first k on", _PARTS, "first_k + k_of_part)", "k_of_part)", shows_in=DEPTHS),
    Mutation("as deep as the first group", _PARTS, "KBlocks(0, p.parts.num_k_blocks[tile.part])", "KBlocks(0, p.parts.num_k_blocks[0])", shows_in=DEPTHS),
    Mutation("C of the first group", _PARTS, "p.c + p.parts.group[tile.part] * p.parts.c_stride * kOutputBytes", "p.c", shows_in=DEPTHS),
    Mutation("C of the deepest group", _PARTS, "p.c + p.parts.group[tile.part] *", "p.c + tile.part *", shows_in=DEPTHS),
    Mutation("D of the deepest group", _PARTS, "{ return p.parts.group[tile.part]; }", "{ return tile.part; }", shows_in=DEPTHS),
    # Groups along k, by depths on the GPU
    Mutation("depths from the host everywhere", _COUNTED, "if (depths.counts == nullptr)", "if (true)", shows_in=COUNTED),
    Mutation("depths from the GPU everywhere", _COUNTED, "if (depths.counts == nullptr)", "if (false)", shows_in=COUNTED),
    Mutation("begins behind the groups that are deeper", _COUNTED, "row += is_before ?", "row += is_ahead ?", shows_in=COUNTED),
    Mutation("begins behind itself", _COUNTED, "is_before = other + i < group;", "is_before = other + i <= group;", shows_in=COUNTED),
    Mutation("the shallowest first", _COUNTED, "(counts[i] > own)", "(counts[i] < own)", shows_in=COUNTED_ADDING),
    Mutation("groups of one depth in one place", _COUNTED, "((counts[i] == own) & is_before)", "false", shows_in=COUNTED),
    Mutation("the last group counted again", _COUNTED, "place += (other + i < depths.groups) & is_ahead;", "place += is_ahead;", shows_in=COUNTED),
    Mutation("each launch places all groups", _COUNTED, "place >= depths.first && place - depths.first < depths.count", "place < depths.count", shows_in=COUNTED),
    Mutation("depths that are wrong", _COUNTED, "own < rest ? own : rest", "own", shows_in=COUNTED),
    Mutation("depths below zero", _COUNTED, "count < 0 ? 0 : static_cast", "static_cast", shows_in=COUNTED),
    Mutation("tiles before all parts are placed", _COUNTED, "  ptx::syncthreads();\n", "", shows_in=COUNTED),
    Mutation("whole k-blocks of every group", _COUNTED, "rest < kBlockK ? kBlockK - rest : 0,", "0,", shows_in=COUNTED),
    Mutation("zeros are rows of the group before", _COUNTED, "tile.first_k + k_of_part)", "tile.first_k + k_of_part - zeros)", shows_in=COUNTED),
    Mutation("all groups from the first row on", _COUNTED, "first, tile.first_k + k_of_part", "first, k_of_part", shows_in=COUNTED),
    Mutation("A uncut", _OPERAND, "slot.a, k, tile.row_m", "slot.a, 0, tile.row_m", shows_in=COUNTED),
    Mutation("B uncut", _OPERAND, "* kLineBytes, k / kPackedB,", "* kLineBytes, 0,", shows_in=COUNTED),
    Mutation("k-blocks rounded down", _COUNTED, "ceil_div(part.y, kBlockK)", "(part.y / kBlockK)", shows_in=COUNTED),
    Mutation("the last counted group left out", _COUNTED, "tiles_of_part * depths.count) return", "tiles_of_part * (depths.count - 1)) return", shows_in=COUNTED),
    Mutation("counted groups without depth still added", _COUNTED, "!kAddsToD || tile.num_k_blocks != 0", "!kAddsToD || tile.num_k_blocks == 0", shows_in=COUNTED_ADDING),
    Mutation("counted tiles go through all groups", _COUNTED, "take(tile, next_tile - number * tiles_of_part)", "take(tile, next_tile)", shows_in=COUNTED),
    Mutation("C of the first counted group", _COUNTED, "p.c + tile.group * p.depths.c_stride * kOutputBytes", "p.c", shows_in=COUNTED),
    Mutation("D of the first counted group", _COUNTED, "{ return tile.group; }", "{ return 0; }", shows_in=COUNTED),
]  # fmt: skip

ACTIVATED_TRIALS = [
    Bf16RowsTrial(ACTIVATED, (70, 128, 198), 8, n=136, k=200, limit=0.5),
    Bf16RowsTrial(NARROW, (70, 128, 333), 2, n=136, k=200, num_sms=2),
]

ACTIVATED_MUTATIONS = [
    Mutation("gates above the limit", _ACTIVATED, "ptx::min_nan(gate, limit)", "gate"),
    Mutation("ups beyond the limit", _ACTIVATED, "ptx::min_magnitude(up, limit)", "up"),
    Mutation("gates not rounded", _ACTIVATED, "ptx::unpack_bf16(ptx::pack_bf16(unit[i], unit[i + 1]))", "ptx::Float2{unit[i], unit[i + 1]}"),
    Mutation("ups not rounded", _ACTIVATED, "ptx::unpack_bf16(ptx::pack_bf16(unit[up], unit[up + 1]))", "ptx::Float2{unit[up], unit[up + 1]}"),
    Mutation("a gate's neighbour for up", _ACTIVATED, "up = kGateColumns / 2 + i", "up = kGateColumns / 2 - 2 + i"),
    Mutation("half of the gates", _ACTIVATED, "i < kGateColumns / 2; i += 2", "i < kGateColumns / 4; i += 2"),
    Mutation("stored at the product's columns", _STORE, "(tile.row_n + column_of_unit(unit)) / kColumnsOfValue", "(tile.row_n + column_of_unit(unit))"),
    Mutation("panels of what is left of ups", "epilogue/panels.cuh", "kPanelsPerUnit = kUnitN / kColumnsOfValue /", "kPanelsPerUnit = kUnitN /"),
    Mutation("gate's rows for up", _GATES, "kGateColumns ? 0 : p.n / 2)", "kGateColumns ? 0 : 0)"),
    Mutation("turns of gate and up as wide as a tile", _GATES, "column / kTurn * kGateColumns", "column"),
]  # fmt: skip
