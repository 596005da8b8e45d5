"""Mistakes in the activations of cast_rows, and the trials that must notice them."""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_rows import cast_config
from deep_gemm.casts.gating import Gating
from lab.sim.cast_rows import RowTrial
from lab.sim.mutate import Mutation

TYPES = torch.bfloat16, torch.float16, torch.float32
BF16, FP16, FP32 = (cast_config(dtype, is_aligned=True, is_few=False, activates=True) for dtype in TYPES)
SINGLE = cast_config(torch.bfloat16, is_aligned=False, is_few=True, activates=True)

TRIALS = [
    RowTrial(BF16, 33, 264, 1, data="ordinary"),
    RowTrial(BF16, 33, 264, 2, "slow_warps", data="ordinary", has_weights=True),
    RowTrial(BF16, 33, 264, 3, "slow_lanes", data="ordinary", gating=Gating(limit=2.0)),
    RowTrial(BF16, 33, 264, 4, data="far", has_weights=True),
    RowTrial(BF16, 33, 264, 4, data="mixed", has_weights=True, gating=Gating(limit=0.25)),
    RowTrial(FP16, 21, 136, 5),
    RowTrial(FP32, 21, 132, 6, has_weights=True),
    RowTrial(SINGLE, 5, 261, 7, data="mixed", padding=3),
    RowTrial(BF16, 33, 264, 8, data="ordinary", gating=Gating("swiglu", 1.702, 1.0, 7.0)),
    RowTrial(BF16, 33, 264, 9, data="ordinary", has_weights=True, gating=Gating("situ", 4.0, 25.0)),
    RowTrial(BF16, 33, 264, 10, data="far", gating=Gating("situ", 4.0, 25.0)),
    RowTrial(FP32, 21, 132, 11, data="ordinary", gating=Gating("situ", 1000.0, 2.0)),
]

_SILU, _SIGMOID, _VALUES = "cast/source_silu.cuh", "cast/silu.cuh", "cast/values.cuh"
_PRODUCT = "return ptx::mul_rn(ptx::mul_rn(silu(gate, alpha), up), weight);"

MUTATIONS = [
    Mutation("keys are of 16 bits", _VALUES, "kCastsFp32 = kInputIsFp32 || kActivates;", "kCastsFp32 = kInputIsFp32;"),
    # Addresses
    Mutation("rows of x lie as far apart as they are long", _SILU, "uint64_t{row} * p.x_pitch", "uint64_t{row} * p.k * 2 * kInputBytes"),
    Mutation("gate for up", _SILU, "gate + uint64_t{p.k} * kInputBytes", "gate"),
    Mutation("up begins a byte for each column behind gate", _SILU, "uint64_t{p.k} * kInputBytes", "uint64_t{p.k}"),
    Mutation("gates of the first block", _SILU, "load_piece(gate, is_there, block * kBlock, p.k, lane)", "load_piece(gate, is_there, 0, p.k, lane)"),
    Mutation("ups of the first block", _SILU, "kInputBytes, is_there, block * kBlock, p.k, lane)", "kInputBytes, is_there, 0, p.k, lane)"),
    Mutation("up for gate", _SILU, "element_of(loaded.gate, e)", "element_of(loaded.up, e)"),
    # Weights
    Mutation("weights of rows past the last", _SILU, "p.row_weights != nullptr && is_there", "p.row_weights != nullptr"),
    Mutation("weights that are not given", _SILU, "p.row_weights != nullptr && is_there", "is_there"),
    Mutation("the first row's weight", _SILU, "p.row_weights + row)", "p.row_weights)"),
    Mutation("no weights", _SIGMOID, "ptx::mul_rn(ptx::mul_rn(silu(gate, alpha), up), weight)", "ptx::mul_rn(silu(gate, alpha), up)"),
    # The order of products
    Mutation("up is weighted", _SIGMOID, _PRODUCT, "return ptx::mul_rn(silu(gate, alpha), ptx::mul_rn(up, weight));"),
    Mutation("gate times up first", _SIGMOID, _PRODUCT, "return ptx::mul_rn(ptx::mul_rn(ptx::mul_rn(gate, up), sigmoid(gate, alpha)), weight);"),
    # The activation
    Mutation("a sigmoid alone", _SIGMOID, "return ptx::mul_rn(gate, sigmoid(", "return ptx::mul_rn(1.f, sigmoid("),
    Mutation("exp of the gate", _SIGMOID, "gate * (-kLog2OfE * alpha)", "gate * (kLog2OfE * alpha)"),
    Mutation("powers of two for those of e", _SIGMOID, "gate * (-kLog2OfE * alpha)", "-gate * alpha"),
    Mutation("a logarithm that was cut off", _SIGMOID, "1.44269504f", "1.44f"),
    Mutation("no 1 below the fraction", _SIGMOID, "1.f + ptx::ex2_approx(gate", "ptx::ex2_approx(gate"),
    Mutation("up is forgotten", _SIGMOID, "ptx::mul_rn(silu(gate), up)", "silu(gate)"),
    # The limit
    Mutation("gates have no limit", _SIGMOID, "gate = ptx::min_nan(gate, limit), ", ""),
    Mutation("gates have a limit below", _SIGMOID, "ptx::min_nan(gate, limit)", "ptx::min_magnitude(gate, limit)"),
    Mutation("ups have no limit", _SIGMOID, "ptx::min_magnitude(up, limit) + beta", "up + beta"),
    Mutation("ups have no limit below", _SIGMOID, "ptx::min_magnitude(up, limit)", "ptx::min_nan(up, limit)"),
    Mutation("all rows are plain", _SILU, "if (p.gating == 0)", "if (true)"),
    Mutation("the limit is zero", _SIGMOID, "limit(p.limit)", "limit(0.f)"),
    # Other activations
    Mutation("sigmoids of one slope", _SIGMOID, "-kLog2OfE * alpha", "-kLog2OfE"),
    Mutation("up has no summand", _SIGMOID, "ptx::min_magnitude(up, limit) + beta", "ptx::min_magnitude(up, limit)"),
    Mutation("up is cut off last", _SIGMOID, "ptx::min_magnitude(up, limit) + beta", "ptx::min_magnitude(up + beta, limit)"),
    Mutation("bounds are those of SwiGLU", _SILU, "p.gating == 1 ? activated<Swiglu>", "true ? activated<Swiglu>"),
    Mutation("the gate's bound for up", _SIGMOID, "bounded(up, beta, beta_reciprocal)", "bounded(up, alpha, alpha_reciprocal)"),
    Mutation("up's bound for the gate", _SIGMOID, "bounded(gate, alpha, alpha_reciprocal)", "bounded(gate, beta, beta_reciprocal)"),
    Mutation("no sigmoid beside the bound", _SIGMOID, "ptx::mul_rn(bounded(gate, alpha, alpha_reciprocal), sigmoid(gate, 1.f))", "bounded(gate, alpha, alpha_reciprocal)"),
    Mutation("bounds are not weighted", _SIGMOID, "ptx::mul_rn(ptx::mul_rn(of_gate, bounded(up, beta, beta_reciprocal)), weight)", "ptx::mul_rn(of_gate, bounded(up, beta, beta_reciprocal))"),
    Mutation("nothing is bounded", _SIGMOID, "ptx::mul_rn(bound, tanh_of(x * reciprocal))", "x"),
    Mutation("tanh is not stretched", _SIGMOID, "ptx::mul_rn(bound, tanh_of(x * reciprocal))", "tanh_of(x * reciprocal)"),
    Mutation("tanh of what is no quotient", _SIGMOID, "tanh_of(x * reciprocal)", "tanh_of(x)"),
    Mutation("a fraction near zero too", _SIGMOID, "magnitude < 0.25f ? small : with_sign", "with_sign"),
    Mutation("a series everywhere", _SIGMOID, "magnitude < 0.25f ? small : with_sign", "small"),
    Mutation("a series too far", _SIGMOID, "magnitude < 0.25f", "magnitude < 0.75f"),
    Mutation("a series of two terms", _SIGMOID, "square * (2.f / 15 + square * (-17.f / 315 + square * (62.f / 2835)))", "0.f"),
    Mutation("tanh of half", _SIGMOID, "kTwoLog2OfE = 2.88539008f", "kTwoLog2OfE = 1.44269504f"),
    Mutation("tanh without a sign", _SIGMOID, " | (ptx::bits_of(x) & 0x80000000)", ""),
]  # fmt: skip
