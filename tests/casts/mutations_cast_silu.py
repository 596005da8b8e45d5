"""Ways to break what cast_rows activates, and the trials they meet."""

from __future__ import annotations

import torch

from deep_gemm.casts.cast_rows import cast_config
from lab.sim.cast_rows import RowTrial
from lab.sim.mutate import Mutation

BF16, FP16, FP32 = (
    cast_config(dtype, is_aligned=True, is_few=False, activates=True)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
)
SINGLE = cast_config(torch.bfloat16, is_aligned=False, is_few=True, activates=True)

TRIALS = [
    RowTrial(BF16, 33, 264, 1, data="ordinary"),
    RowTrial(BF16, 33, 264, 2, "slow_warps", data="ordinary", has_weights=True),
    RowTrial(BF16, 33, 264, 3, "slow_lanes", data="ordinary", limit=2.0),
    RowTrial(BF16, 33, 264, 4, data="far", has_weights=True),
    RowTrial(BF16, 33, 264, 4, data="mixed", has_weights=True, limit=0.25),
    RowTrial(FP16, 21, 136, 5),
    RowTrial(FP32, 21, 132, 6, has_weights=True),
    RowTrial(SINGLE, 5, 261, 7, data="mixed", padding=3),
]

_SILU, _SIGMOID, _VALUES = "cast/source_silu.cuh", "cast/silu.cuh", "cast/values.cuh"
_PRODUCT = "const float product = ptx::mul_rn(silu(gate), up);\n    held.words[e] = ptx::bits_of(kIsPlain ? product : ptx::mul_rn(product, loaded.weight));"

MUTATIONS = [
    Mutation("keys are of 16 bits", _VALUES, "kCastsFp32 = kInputIsFp32 || kActivates;", "kCastsFp32 = kInputIsFp32;"),
    # Where things are
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
    Mutation("no weights", _SILU, "ptx::mul_rn(product, loaded.weight)", "product"),
    # The order of products
    Mutation("up is weighted", _SILU, _PRODUCT, "held.words[e] = ptx::bits_of(ptx::mul_rn(silu(gate), ptx::mul_rn(up, loaded.weight)));"),
    Mutation("gate times up first", _SILU, _PRODUCT, _PRODUCT.replace("ptx::mul_rn(silu(gate), up)", "ptx::mul_rn(ptx::mul_rn(gate, up), silu(gate) / gate)")),
    # The activation
    Mutation("a sigmoid alone", _SIGMOID, "return ptx::mul_rn(gate, ptx::rcp_approx(", "return ptx::mul_rn(1.f, ptx::rcp_approx("),
    Mutation("exp of the gate", _SIGMOID, "gate * -kLog2OfE", "gate * kLog2OfE"),
    Mutation("powers of two for those of e", _SIGMOID, "gate * -kLog2OfE", "-gate"),
    Mutation("a logarithm that was cut off", _SIGMOID, "1.44269504f", "1.44f"),
    Mutation("no 1 below the fraction", _SIGMOID, "1.f + ptx::ex2_approx", "ptx::ex2_approx"),
    Mutation("up is forgotten", _SILU, "ptx::mul_rn(silu(gate), up)", "silu(gate)"),
    # The limit
    Mutation("gates have no limit", _SILU, "gate = ptx::min_nan(gate, limit), ", ""),
    Mutation("gates have a limit below", _SILU, "ptx::min_nan(gate, limit)", "ptx::min_magnitude(gate, limit)"),
    Mutation("ups have no limit", _SILU, ", up = ptx::min_magnitude(up, limit);", ";"),
    Mutation("ups have no limit below", _SILU, "ptx::min_magnitude(up, limit)", "ptx::min_nan(up, limit)"),
    Mutation("all rows are plain", _SILU, "p.is_plain ? activated<true>", "true ? activated<true>"),
    Mutation("the limit is zero", _SILU, "activated<false>(loaded, p.limit)", "activated<false>(loaded, 0.f)"),
]  # fmt: skip
