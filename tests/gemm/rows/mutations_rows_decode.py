"""Ways to break how fp8_gemm_decode finds and stores tiles of grouped rows, and the trials that must notice."""

from __future__ import annotations

from deep_gemm.core.check.recipes import E2M1, MX
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.kinds import works
from lab.sim.mutate import Mutation
from lab.sim.rows import DecodeRowsTrial as Trial

KINDS = works.IDS, works.ENDS, works.COUNTS
IDS, ENDS, COUNTS = (DecodeConfig(8, 2, 1, 1, 2, work=groups, b=E2M1, sfb=MX) for groups in KINDS)
FEW = DecodeConfig(16, 3, 2, 1, 2, work=works.IDS)
WIDE = DecodeConfig(16, 2, 2, 1, 1, is_fp32=True, work=works.COUNTS)
BY_IDS = (2,) * 9 + (-1,) * 4 + (0,) * 3 + (1,) * 17 + (-1,) * 6 + (2,) * 2
MANY = (0,) * 7 + (-1,) * 600 + (1,) * 3 + (-1,) * 30 + (0,) * 9

TRIALS = [
    *(Trial(IDS, BY_IDS, seed, n=200, k=672, num_groups=4, num_sms=2) for seed in (1, 2)),
    Trial(IDS, MANY, 3, n=72, k=160, num_groups=2, num_sms=1),
    Trial(IDS, BY_IDS, 3, n=72, k=160, num_groups=4, num_sms=1, zero_padding=False),
    *(Trial(IDS, BY_IDS, 4, name, n=136, k=1312, num_groups=4) for name in ("late_loads", "slow_math", "slow_warps")),
    Trial(ENDS, (5, 5, 21, 33), 5, rows=40, alignment=8, n=200, k=672, num_sms=3),
    Trial(ENDS, (5, 5, 21, 33), 6, rows=48, alignment=16, n=136, k=288, zero_padding=False),
    *(Trial(COUNTS, (3, 0, 20, 8), seed, rows=30, n=200, k=1184, num_sms=2, any_scales=True) for seed in (7, 8)),
    Trial(COUNTS, (3, 0, 20, 8), 9, "slow_producer", rows=30, n=72, k=4160, num_sms=1),
    *(Trial(FEW, BY_IDS, 11, name, n=264, k=256, num_groups=4, num_sms=2) for name in (None, "slow_warps")),
    Trial(FEW, BY_IDS, 12, n=136, k=640, num_groups=4, num_sms=1, is_dependent=True, weight_is_ready=False),
    Trial(FEW, BY_IDS, 12, n=136, k=640, num_groups=4, num_sms=1, is_dependent=True, weight_is_ready=True),
    Trial(WIDE, (17, 1, 0, 40), 10, rows=41, n=264, k=1040, num_sms=2),
]

_ROWS, _DECODE = "decode/rows.cuh", "fp8_gemm_decode.cuh"

MUTATIONS = [
    # Tiles
    Mutation("a tile is left out", _ROWS, "next_tile += ptx::grid_size()", "next_tile += ptx::grid_size() + 1"),
    Mutation("columns counted by the last tile", _ROWS, "ceil_div(p.n, kBlockN);", "p.n / kBlockN;"),
    Mutation("tiles of rows begin at the group", _ROWS, "(found.number - tile_n * tiles_m) * kBlockTokens", "0"),
    Mutation("stretches begin at row 0", _ROWS, "{rows.first + (", "{0 * rows.first + ("),
    Mutation("a tile ends with its rows", _ROWS, "tile_n * kBlockN, rows.end,", "tile_n * kBlockN, rows.first + kBlockTokens,"),
    Mutation("the first group's tiles", _ROWS, "rows.end, rows.group}", "rows.end, 0 * rows.group}"),
    Mutation("no end is dealt", _ROWS, "  if (ptx::lane_index() == 0) storage.queue.deal(number, {0, 0, 0, 0});", ""),
    Mutation("a tile is loaded before it is dealt its place", _ROWS, "      ++number;\n    }\n    if", "    }\n    if"),
    Mutation("tiles are not given back", _ROWS, "    storage.queue.give_back(number, dealt.x, ptx::lane_index() == 0);\n", ""),
    Mutation("k rounded down", _ROWS, "end_k_block = ceil_div(p.k, kBlockK)", "end_k_block = p.k / kBlockK"),
    # Operands
    Mutation("rows of the next groups are multiplied too", _ROWS, "product.m = work.end_m;", ""),
    Mutation("the first group's scales of A", _ROWS, "  product.sfa += work.group * p.sfa_stride;\n", ""),
    Mutation("the first group's scales of B", _ROWS, "  product.sfb += work.group * p.groups.sfb_stride;\n", ""),
    Mutation("all groups have the first one's D", _ROWS, "  product.d += work.group * p.d_stride * kOutputBytes;\n", ""),
    Mutation("D's groups are apart by elements", _ROWS, "p.d_stride * kOutputBytes", "p.d_stride"),
    Mutation("the first group's B", _ROWS, "kIsB || kGroups == kGroupCounts ? work.group : 0", "kIsB ? 0 : work.group"),
    Mutation("A by groups where rows are stacked", _ROWS, "kIsB || kGroups == kGroupCounts ?", "true ?"),
    # D
    Mutation("warps share their room", _ROWS, "storage.room[warp]", "storage.room[0]"),
    Mutation("chunks of tokens beside each other", _ROWS, "tile.row_m + i * 8, tile.row_n", "tile.row_m + i * 4, tile.row_n"),
    Mutation("warps store the same columns", _ROWS, "tile.row_n + warp * 16", "tile.row_n"),
    Mutation("padding is not zeroed", _ROWS, "if (p.groups.zeroes_padding)", "if (false)"),
    Mutation("padding is always zeroed", _ROWS, "if (p.groups.zeroes_padding)", "if (true)"),
    # The kernel ahead
    Mutation("the weight is loaded ahead though it is not ready", _ROWS, "if (!p.weight_is_ready) ptx::griddepcontrol_wait();", ""),
    Mutation("every tile's weight comes ahead", _ROWS, "load(work, at, number == 0)", "load(work, at, true)"),
    Mutation("the next tile begins where the ring did", _DECODE, "multiply(product, shared, work, at, total);", "at = RingPosition(), multiply(product, shared, work, at, total);"),
]  # fmt: skip
