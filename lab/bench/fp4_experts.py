"""Mixtures of experts with FP4 weights compared with FP8 weights and a read of the weights in use. Timed cold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from deep_gemm.casts.fp4 import cast_back_from_fp4, quantize_mxfp4
from deep_gemm.casts.fp8 import per_block_cast_to_fp8
from deep_gemm.cli.models import MODELS
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.ue8m0 import words_of
from deep_gemm.gemm.packed import COLUMNS
from deep_gemm.moe import api as public

from . import experts, fp4, layers
from .bulk_read import READ, read, read_of
from .contenders import OURS
from .fp4 import FP8, RANKS
from .layers import Layer

METHOD = (
    f"fp4_experts: {layers.METHOD}; each token goes to top-k different experts at random; normal weights by "
    "quantize_mxfp4, scales as words; deep_gemm: deep_gemm.experts, whose result is that of the public parts bit for "
    "bit; deep_gemm_fp8: the same with the same numbers in FP8, 128x128; bulk_read: a kernel that brings the FP4 "
    "weights of the experts that are hit, and x and the result, from DRAM into shared memory; error: relative, beside "
    "a chain in BF16"
)
CONTENDERS = (OURS, FP8, READ)
TOKENS, QUICK_TOKENS = (1, 8, 32, 128, 256, 1024, 4096), (8, 256)
AIMED_AT = (48, 8, 6144, 2048)


def shapes_of(*, quick: bool = False) -> list[experts.Shape]:
    """List the shapes to measure: each model's experts on one of eight ranks."""
    models = dict.fromkeys(
        (each.experts // RANKS, each.experts_per_token, each.hidden, each.expert_width)
        for each in MODELS.values()
        if each.experts_are_fp4
    )
    sizes, tokens = ([AIMED_AT], QUICK_TOKENS) if quick else (list(models), TOKENS)
    return [(count, topk, m, hidden, width) for count, topk, hidden, width in sizes for m in tokens]


def weights_of(num_experts: int, hidden: int, intermediate: int, device: str) -> experts.Weights:
    """Make weights at random, expert by expert to save memory."""
    torch.manual_seed(0)
    (w1, fp8_1, plain1), (w2, fp8_2, plain2) = (
        _weights(num_experts, n, k, device) for n, k in ((2 * intermediate, hidden), (hidden, intermediate))
    )
    return experts.Weights(w1, w2, plain1, plain2, (fp8_1, fp8_2))


def _weights(num_experts: int, n: int, k: int, device: str) -> tuple[Operand, Operand, Tensor]:
    fp4, fp8, plain = [], [], torch.empty(num_experts, n, k, dtype=torch.bfloat16, device=device)
    for expert in range(num_experts):
        fp4.append(quantize_mxfp4(torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5))
        plain[expert] = cast_back_from_fp4(*fp4[-1], COLUMNS)
        fp8.append(per_block_cast_to_fp8(plain[expert]))
    (packed, exponents), of_fp8 = (tuple(map(torch.stack, zip(*each, strict=True))) for each in (fp4, fp8))
    return (packed, words_of(exponents)), (of_fp8[0], of_fp8[1]), plain


class Fp4Experts(experts.Experts):
    """Tokens and routes, and the ways to compute the mixture."""

    kind: ClassVar[str] = "fp4_experts"

    def contenders(self) -> Iterator[Layer]:
        """Yield every way to compute the mixture."""
        given = self.x, self.topk_ids, self.topk_weights
        assert self.weights.fp8 is not None
        ways = ((OURS, (self.weights.w1, self.weights.w2), self.out), (FP8, self.weights.fp8, self.out_of_eager))
        for name, weights, out in ways:
            yield Layer(name, partial(public.experts, *given, *weights, out=out), parts=layers.parts_of_experts)
        source = read_of(self.work.bytes).to(self.x.device)
        yield Layer(READ, lambda: read(source))


BENCH = experts.bench_of(
    Fp4Experts, weights_of, shapes_of, "48,8,64,6144,2048", method=METHOD, tables=fp4.tables, contenders=CONTENDERS
)
