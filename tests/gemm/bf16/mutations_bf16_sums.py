"""Mistakes in the code that only sums over BF16 products have, and the trials that must notice them."""

from __future__ import annotations

from deep_gemm.gemm.choose.bf16 import SUM_OUTPUT
from deep_gemm.gemm.config.bf16 import bf16_config
from deep_gemm.gemm.sum_slices import KERNEL
from lab.sim.bf16_sums import SlicesTrial, SumTrial
from lab.sim.mutate import Mutation

_SUMS, _SLICES = "work/sums.cuh", "sum_slices.cuh"
CONFIG = bf16_config(64, 64, SUM_OUTPUT)
BF16, FP32, ADDED = KERNEL.configs()

TRIALS = [SumTrial(CONFIG, 4, 5, 70, 72, 192, 1), SumTrial(CONFIG, 3, 3, 40, 72, 128, 3, output=ADDED)]
SLICES_TRIALS = [SlicesTrial(BF16, 4, 70, 72, 1), SlicesTrial(FP32, 83, 2, 136, 2), SlicesTrial(ADDED, 3, 40, 72, 3)]

MUTATIONS = [
    Mutation("all slices begin at the first block", _SUMS, "k_blocks * tile.plane / p.sum.slices", "0 * tile.plane / p.sum.slices"),
    Mutation("slices end where they begin", _SUMS, "(tile.plane + 1) / p.sum.slices", "tile.plane / p.sum.slices"),
    Mutation("blocks of one product alone", _SUMS, "static_cast<uint64_t>(p.sum.products) *", "static_cast<uint64_t>(1) *"),
    Mutation("the first block of each product", _SUMS, "(k_block - product * k_blocks_of_product) * kBlockK", "0"),
    Mutation("one slice of all", _SUMS, "return p.sum.slices;", "return 1;"),
]  # fmt: skip

SLICES_MUTATIONS = [
    Mutation("slices read before they are written", _SLICES, "  ptx::griddepcontrol_wait();\n", "", shows_in=BF16),
    Mutation("the last slice left out", _SLICES, "p.count * (warp + 1) / kWarps", "(p.count - 1) * (warp + 1) / kWarps", shows_in=BF16),
    Mutation("the first slices of every warp", _SLICES, "first = p.count * warp / kWarps", "first = 0", shows_in=BF16),
    Mutation("as many slices as are loaded at once", _SLICES, "first < end; first += kAtOnce", "first < end; first += p.count", shows_in=FP32),
    Mutation("a slice's columns again", _SLICES, "at + (first + i) * plane", "at", shows_in=BF16),
    Mutation("warps do not meet", _SLICES, "  ptx::syncthreads();\n", "", shows_in=BF16),
    Mutation("the last warp's sum left out", _SLICES, "i = 1; i < kWarps", "i = 1; i + 1 < kWarps", shows_in=BF16),
    Mutation("columns outside stored", _SLICES, "if (warp != 0 || !is_any) return;", "if (warp != 0) return;", shows_in=BF16),
    Mutation("D not added", _SLICES, "if constexpr (kAddsToD) add", "if constexpr (false) add", shows_in=ADDED),
    Mutation("the first row alone", _SLICES, "static_cast<uint64_t>(row) * p.d_pitch", "static_cast<uint64_t>(0) * p.d_pitch", shows_in=BF16),
]  # fmt: skip
