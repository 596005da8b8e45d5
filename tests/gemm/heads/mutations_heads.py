"""Mistakes in code that only products of heads have, and the trials that must notice them."""

from __future__ import annotations

from dataclasses import replace

from deep_gemm.core.check.recipes import PER_ROW
from deep_gemm.gemm.choose.tiles import Tile
from deep_gemm.gemm.kinds import works
from deep_gemm.gemm.kinds.output import Output
from lab.sim.heads import of_tile
from lab.sim.mutate import Mutation

BF16 = Output(work=works.HEADS)
FP32 = replace(BF16, is_fp32=True)


PLAIN = of_tile(Tile(64, 64), BF16, 3, 70, 136, 400)
SHARES_B = of_tile(Tile(128, 128, cluster_m=2), BF16, 3, 300, 136, 272)
SHARES_A = of_tile(Tile(128, 64, cluster_n=2), BF16, 3, 140, 136, 272)
WITH_C = of_tile(Tile(64, 64), replace(FP32, with_c=True), 3, 70, 72, 272)
ADDING = of_tile(Tile(64, 64), replace(FP32, adds_to_d=True), 3, 70, 72, 272)
ADDING_NARROW = of_tile(Tile(64, 32), replace(FP32, adds_to_d=True), 3, 70, 40, 272)
BY_ROW = of_tile(Tile(64, 64), replace(FP32, sfb=PER_ROW), 3, 70, 136, 272)
FEW = of_tile(Tile(64, 64), BF16, 3, 21, 136, 272)
DECODE = of_tile(Tile(16, 64, cluster_k=2, is_decode=True), BF16, 3, 21, 136, 400)
DECODE_WIDE = of_tile(Tile(16, 128, is_decode=True), BF16, 3, 9, 264, 400)
DECODE_C = of_tile(Tile(8, 64, is_decode=True), replace(BF16, with_c=True), 3, 11, 72, 272, is_dependent=True)

TRIALS = [
    PLAIN,
    replace(PLAIN, seed=1, schedule="late_loads"),
    SHARES_B,
    SHARES_A,
    WITH_C,
    ADDING,
    ADDING_NARROW,
    BY_ROW,
    FEW,
    DECODE,
    DECODE_WIDE,
    DECODE_C,
]

_HEADS, _PLANES, _DECODE = "work/heads.cuh", "work/planes.cuh", "decode/heads.cuh"
_OPERAND, _TILE, _TO_PLANE = "operand.cuh", "tile.cuh", "epilogue/to_plane.cuh"

MUTATIONS = [
    # fp8_gemm
    Mutation("the last head left out", _PLANES, "tiles_of_plane * planes) return false", "tiles_of_plane * (planes - 1)) return false", shows_in=PLAIN.config),
    Mutation("tiles counted through all heads", _PLANES, "take(tile, next_tile - tile.plane * tiles_of_plane)", "take(tile, next_tile)", shows_in=PLAIN.config),
    Mutation("A of the first head", _OPERAND, "slot.a, k, tile.row_m, planes...)", "slot.a, k, tile.row_m, (planes, 0)...)", shows_in=PLAIN.config),
    Mutation("B of the first head", _OPERAND, "tile.row_n + row, planes...)", "tile.row_n + row, (planes, 0)...)", shows_in=PLAIN.config),
    Mutation("a shared operand of the first head", _OPERAND, "row + first, planes...);", "row + first, (planes, 0)...);", shows_in=SHARES_A.config),
    Mutation("both load the same part of an operand", _OPERAND, "ptx::cluster_rank() * kPart", "0", shows_in=SHARES_B.config),
    Mutation("A's scales of the first head", _OPERAND, "k_block * kScaleParts, planes...)", "k_block * kScaleParts, (planes, 0)...)", shows_in=PLAIN.config),
    Mutation("B's scales by row of the first head", _OPERAND, "k_block * kScalePartsOfB, planes...)", "k_block * kScalePartsOfB, (planes, 0)...)", shows_in=BY_ROW.config),
    Mutation("B's scales of the first head", _HEADS, "p.sfb + tile.plane * p.heads.sfb_stride", "p.sfb", shows_in=PLAIN.config),
    Mutation("C of the first head", _HEADS, "p.c + tile.plane * p.heads.c_stride * kOutputBytes", "p.c", shows_in=WITH_C.config),
    Mutation("C's stride taken for bytes", _HEADS, "p.heads.c_stride * kOutputBytes", "p.heads.c_stride", shows_in=WITH_C.config),
    Mutation("D of the first head", _TO_PLANE, "store_panel(&p.map_d, panel, column, row, plane)", "store_panel(&p.map_d, panel, column, row, 0)", shows_in=PLAIN.config),
    Mutation("a wide D of the first head", _TO_PLANE, "span.at_column(column), row, plane);\n    else\n      store_panel", "span.at_column(column), row, 0);\n    else\n      store_panel", shows_in=WITH_C.config),
    # fp8_gemm_decode
    Mutation("tiles of n rounded down in few rows", _DECODE, "tiles_n = ceil_div(p.n, kBlockN)", "tiles_n = p.n / kBlockN", shows_in=DECODE.config),
    Mutation("columns counted through all heads", _DECODE, "(tile_n - head * tiles_n) * kBlockN", "tile_n * kBlockN", shows_in=DECODE.config),
    Mutation("operands of the first head", _DECODE, "k, row, work.head)", "k, row, 0)", shows_in=DECODE.config),
    Mutation("few rows: A's scales of the first head", _DECODE, "  product.sfa += work.head * p.heads.sfa_stride;\n", "", shows_in=DECODE.config),
    Mutation("few rows: B's scales of the first head", _DECODE, "  product.sfb += work.head * p.heads.sfb_stride;\n", "", shows_in=DECODE.config),
    Mutation("few rows: D of the first head", _DECODE, "  product.d += work.head * p.heads.d_stride * kOutputBytes;\n", "", shows_in=DECODE.config),
    Mutation("few rows: C of the first head", _DECODE, "  product.c += work.head * p.heads.c_stride * kOutputBytes;\n", "", shows_in=DECODE_C.config),
    Mutation("few rows: D's stride taken for bytes", _DECODE, "p.heads.d_stride * kOutputBytes", "p.heads.d_stride", shows_in=DECODE.config),
]  # fmt: skip
