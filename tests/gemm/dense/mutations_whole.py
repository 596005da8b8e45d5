"""Mistakes in code for scales that do not change along k and for biases of groups, and the trials for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.of_tile import tile_config
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import BF16_C32, FP32, FP32_C, Output
from lab.sim.dense import DenseTrial
from lab.sim.fp8_gemm_decode import DecodeTrial
from lab.sim.mutate import Mutation
from lab.sim.rows import DecodeRowsTrial, RowsTrial
from lab.sim.whole import PromotedFewTrial, PromotedTrial


def whole(output: Output, **more: object) -> Output:
    """Return the output with operands whose scales do not change along k."""
    return replace(output, sfa=WHOLE, sfb=WHOLE, **more)  # type: ignore[arg-type]


ODD = 1296  # 11 k-blocks, so that every tile has code for any number of k-blocks
TALL, WIDE = tile_config(128, 96, whole(FP32), k=ODD), tile_config(128, 256, whole(BF16_C32), k=ODD)
HIGH = tile_config(256, 128, whole(FP32), k=ODD)
SHARED = tile_config(128, 64, whole(FP32), cluster_m=2, k=ODD)
SPLIT = tile_config(64, 64, whole(FP32_C), cluster_k=3, k=ODD)
COUNTS = tile_config(64, 64, whole(FP32_C, work=works.COUNTS), k=ODD)
ENDS = tile_config(128, 64, whole(BF16_C32, work=works.ENDS), k=ODD)
DECODE = DecodeConfig(48, 3, 2, 1, is_fp32=True, sfa=WHOLE, sfb=WHOLE)
DECODE_SPLIT = DecodeConfig(16, 3, 2, 3, is_fp32=True, sfa=WHOLE, sfb=WHOLE)
DECODE_ROWS = DecodeConfig(8, 3, is_fp32=True, with_c=True, work=works.ENDS, sfa=WHOLE, sfb=WHOLE)
BEHIND_CAST: dict[str, Any] = {"is_dependent": True, "weight_is_ready": True}

TRIALS = [
    *(DenseTrial(TALL, 200, 152, 1296, seed) for seed in (1, 2)),
    *(DenseTrial(TALL, 130, 200, 2048, 3, name) for name in ("late_loads", "slow_math", "slow_producer", "slow_lanes")),
    *(DenseTrial(WIDE, 61, 328, 656, seed) for seed in (4, 5)),
    DenseTrial(HIGH, 270, 152, 1296, 5),
    *(DenseTrial(SHARED, 300, 72, 1296, seed, name) for seed, name in ((6, "slow_cta"), (7, "late_loads"))),
    *(DenseTrial(SPLIT, 61, 136, k, 8) for k in (1808, 3344)),
    *(RowsTrial(COUNTS, (3, 0, 70), seed, rows=77, n=72, k=656, num_groups=None) for seed in (9, 10)),
    RowsTrial(ENDS, (5, 5, 200), 11, rows=210, alignment=1, n=136, k=656),
    *(PromotedTrial(TALL, 45, 72, k, truncate=True) for k in (1024, 1296)),
    *(PromotedFewTrial(DECODE, 45, 72, k, truncate=True) for k in (1024, 1296)),
    *(DecodeTrial(DECODE, 45, 200, 1296, seed) for seed in (12, 13)),
    *(DecodeTrial(DECODE, 45, 72, 1808, 14, name) for name in ("late_loads", "slow_math", "slow_warps")),
    *(DecodeTrial(DECODE_SPLIT, 13, 200, 1936, seed) for seed in (15, 16)),
    DecodeRowsTrial(DECODE_ROWS, (3, 3, 14), 17, rows=20, alignment=1, n=72, k=656),
    # The kernel ahead still writes A and all scales: `linear` and `experts` launch products this way after their casts.
    *(DecodeTrial(each, 45, 200, 1296, 18, **BEHIND_CAST) for each in (DECODE, DECODE_SPLIT)),
    DecodeRowsTrial(DECODE_ROWS, (3, 3, 14), 19, rows=20, alignment=1, n=72, k=656, **BEHIND_CAST),
    DenseTrial(TALL, 45, 72, 1296, 20, is_dependent=True),
]

_FACTORS, _LOOP, _FEW_ROWS, _TOTALS = "factors.cuh", "scales/whole.cuh", "decode/whole.cuh", "decode/tile.cuh"
_WORK, _ROWS = "work/rows.cuh", "decode/rows.cuh"

MUTATIONS = [
    # Sums
    Mutation("totals are the last k-block's", _LOOP, "ptx::fma(partial[i], 1.0f, total[i])", "partial[i]"),
    Mutation("slots are not given back", _LOOP, "if (piece + 1 == kPieces) release_slot", "if (false) release_slot"),
    Mutation("slots are given back by each piece", _LOOP, "if (piece + 1 == kPieces) release_slot", "release_slot"),
    Mutation("few rows' totals are the last k-block's", "decode/tile.cuh", "ptx::add_rn(total[j], partial[j])", "partial[j]"),
    Mutation("few rows' totals do not begin as zeros", _FEW_ROWS, "for (float& x : total) x = 0;", "for (float& x : total) x = 1;"),
    # Scales
    Mutation("scales are read past the last", _FACTORS, "(row < rows ? row : rows - 1) * stride", "row * stride"),
    Mutation("every row has the first one's scale", _FACTORS, "row += step) to", "row += 0) to"),
    Mutation("scales lie beside each other", _FACTORS, "rows - 1) * stride)", "rows - 1))"),
    Mutation("A's scales are the first group's", _LOOP, "sfa += tile.group * p.whole_sfa[2];", ";"),
    Mutation("A's scales are the first tile's", _LOOP, "tile.row_m + ptx::warp_index()", "ptx::warp_index()"),
    Mutation("all warps have the first one's scales", _LOOP, "ptx::warp_index() * 16 + ", ""),
    Mutation("B's scales are the first tile's", _LOOP, "tile.row_n + ptx::lane_index()", "ptx::lane_index()"),
    Mutation("rows are taken for each other", _LOOP, "[i / 2 % 2] * of_column", "[i % 2] * of_column"),
    Mutation("columns are taken for each other", _LOOP, "i / 4 * 8 + i % 2, lane", "i / 4 * 8 + i / 2 % 2, lane"),
    Mutation("columns past the 32nd have the first ones' scales", _LOOP, "of_columns[column / 32]", "of_columns[0]"),
    Mutation("all lanes have one column", _LOOP, "column % 32 + ptx::lane_index() % 4 * 2", "column % 32"),
    Mutation("A's scale is left out", _LOOP, "first.of_rows[unit / kUnitsAlongN][i / 2 % 2] * of_column", "of_column"),
    Mutation("B's scale is left out", _LOOP, "[i / 2 % 2] * of_column", "[i / 2 % 2]"),
    Mutation("all units have the first one's rows", _LOOP, "row + row_of_unit(unit)", "row"),
    Mutation("rows' scales are the first unit's", _LOOP, "of_rows[unit / kUnitsAlongN][i / 2", "of_rows[0][i / 2"),
    Mutation("columns' scales are the first unit's", _LOOP, "column_of_unit(unit) + i / 4", "i / 4"),
    # Few rows
    Mutation("tokens have the first tile's scales", _FEW_ROWS, "work.row_m + lane", "lane"),
    Mutation("tokens past the 32nd have the first ones' scales", _TOTALS, "of_tokens[i / 16]", "of_tokens[0]"),
    Mutation("tokens are taken for each other", _TOTALS, "ptx::lane_index() % 4 * 2 + i % 2", "ptx::lane_index() % 4 * 2 + i / 2 % 2"),
    Mutation("rows of B are taken for each other", _TOTALS, "of_rows[i / 2 % 2]", "of_rows[i % 2]"),
    Mutation("rows of B have the first tile's scales", _FEW_ROWS, "work.row_n + warp * 16", "warp * 16"),
    Mutation("all warps have the first one's rows", _FEW_ROWS, "warp * 16 + lane / 4", "lane / 4"),
    Mutation("both warpgroups multiply the first rows", _FEW_ROWS, "(shared.b) + warp / 4 * 64 * kBlockK", "(shared.b)"),
    Mutation("every CTA multiplies all of k", _FEW_ROWS, "work.end_k_block - work.k_block, at", "work.end_k_block, at"),
    # Biases of groups
    Mutation("all groups have the first one's bias", _WORK, "static_cast<uint64_t>(tile.group) * p.n * kCBytes", "0"),
    Mutation("biases lie as in BF16", _WORK, "(tile.group) * p.n * kCBytes", "(tile.group) * p.n * 2"),
    Mutation("few rows have the first group's bias", _ROWS, "if constexpr (kWithC) product.c +=", "if constexpr (false) product.c +="),
    Mutation("an FP32 C is read as BF16", "epilogue/store.cuh", "pair = kCIsFp32 ?", "pair = kOutputIsFp32 ?"),
]  # fmt: skip
