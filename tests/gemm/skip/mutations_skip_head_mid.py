"""Mistakes easily made in both kernels' code that skips parts of heads, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.gemm.choose.tiles import skipping
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from lab.sim.mutate import Mutation
from lab.sim.skip_head_mid import DecodeSkipTrial, SkipTrial

WIDE = skipping(GemmConfig(128, 128, 3), 64)
NARROW = skipping(GemmConfig(64, 64, 3, 1), 16)
DECODE = skipping(DecodeConfig(16, 4, 2, 3), 16)

TRIALS = [
    SkipTrial(WIDE, 133, 2, (64, 32, 192), 1),
    SkipTrial(WIDE, 133, 3, (128, 64, 64), 2),
    SkipTrial(NARROW, 70, 3, (16, 8, 48), 3),
    SkipTrial(NARROW, 70, 5, (32, 16, 16), 4, "slow_warps"),
    SkipTrial(NARROW, 70, 3, (16, 0, 32), 5),
    DecodeSkipTrial(DECODE, 13, 3, (16, 8, 48), 6),
    DecodeSkipTrial(DECODE, 19, 5, (48, 16, 16), 7, "slow_cta"),
    DecodeSkipTrial(DECODE, 13, 2, (64, 32, 192), 8),
]

_STORE, _DECODE, _HEADS = "epilogue/to_heads.cuh", "decode/skip_mid.cuh", "head_parts.cuh"

MUTATIONS = [
    Mutation("the last column is still left", _STORE, "(at < p.heads.left)", "(at <= p.heads.left)"),
    Mutation("all is left", _STORE, "(at < p.heads.left)", "(at < p.heads.columns)"),
    Mutation("all is right", _STORE, "(at < p.heads.left)", "(false)"),
    Mutation("right parts begin where heads do", _STORE, "at - p.heads.left, head, row", "at, head, row"),
    Mutation("columns of all heads", _STORE, "at = column - head * p.heads.columns", "at = column"),
    Mutation("right parts of the head before", _STORE, "at - p.heads.left, head, row", "at - p.heads.left, head - 1, row"),
    Mutation("rows and heads exchanged", _STORE, "panel, at, head, row", "panel, at, row, head"),
    Mutation("right parts to the left map", _STORE, "&p.map_right_d", "&p.map_d"),
    Mutation("a head more or less", _HEADS, "multiplier >> shift)", "multiplier >> shift) + (column >= columns)"),
    Mutation("half as many heads", _HEADS, ">> shift)", ">> (shift + 1))"),
    Mutation("32 bits for the product", _HEADS, "static_cast<uint64_t>(column / 8) * multiplier", "static_cast<uint64_t>(column / 8 * multiplier)"),
    Mutation("columns for eighths", _HEADS, "(column / 8)", "(column)"),
    Mutation("skips behind the right part", _DECODE, "before(column + p.heads.columns - p.heads.left)", "before(column)"),
    Mutation("skips before the left part", _DECODE, "before(column + p.heads.columns - p.heads.left)", "before(column + p.heads.columns)"),
    Mutation("skips the left part's columns", _DECODE, "- p.heads.left) * p.heads.mid", "- p.heads.left) * p.heads.left"),
    Mutation("skips nothing", _DECODE, " * p.heads.mid", " * 0"),
    Mutation("D's columns are the product's", "decode/tile.cuh", "column_of_d(p, d_column)", "d_column"),
]  # fmt: skip
