"""Products of few rows with fine scales: random ones, and the right D."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.casts.by_torch import cast_by_torch
from deep_gemm.casts.scales import words_of
from deep_gemm.core.check.layout import UE8M0_PER_WORD, ceil_div
from deep_gemm.core.check.recipes import IN_FP32, IN_UE8M0, MX, PER_ROW
from deep_gemm.gemm import reference
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.output import FINE_OPERANDS
from deep_gemm.gemm.packed import numbers_of

from .product import random_d_and_c
from .rounding import allowed_difference

KINDS = (
    *((sfa, sfb, IN_FP32) for _, sfa, sfb in FINE_OPERANDS),
    (PER_ROW, MX, IN_UE8M0),
    (MX, MX, IN_UE8M0),
)
"""Fine scales of A and of B, and what those of B are."""
SOME = 0.02
"""The part of scales in words that is of any size, and of which some are no numbers."""


def random_problem(
    config: DecodeConfig, m: int, n: int, k: int, seed: int = 0, *, in_place: bool = False, any_scales: bool = False
) -> DenseProblem:
    """Make a problem with random values, and scales of which no two are alike.

    `any_scales`: scales of B in words are of any size, or no numbers, here and there.
    """
    generator = torch.Generator().manual_seed(seed)
    a, sfa = cast_by_torch(torch.randn(m, k, generator=generator), *config.sfa)
    b, sfb = cast_by_torch(torch.randn(n, k, generator=generator), *config.sfb)
    if config.sfb_values == IN_UE8M0:
        scales = torch.randint(112, 120, sfb.shape, generator=generator, dtype=torch.uint8)
        if any_scales:
            others = torch.tensor([0, 1, 60, 180, 255], dtype=torch.uint8)
            some = torch.rand(scales.shape, generator=generator) < SOME
            scales = torch.where(some, others[torch.randint(0, 5, scales.shape, generator=generator)], scales)
        behind = torch.full((len(scales), -scales.shape[1] % UE8M0_PER_WORD), 255, dtype=torch.uint8)
        sfb = words_of(torch.cat([scales, behind], 1))  # what is behind is not to be looked at
    else:
        sfb = sfb * (0.5 + torch.rand(sfb.shape, generator=generator))
    sfa = sfa * (0.5 + torch.rand(sfa.shape, generator=generator))
    d, c = random_d_and_c(config, (m, n), generator, in_place)
    return DenseProblem(a, sfa, b, sfb, d, c, m, n, k, config.sfb, config.sfa)


def in_numbers(config: DecodeConfig, p: DenseProblem) -> DenseProblem:
    """Give the problem with B's scales in FP32."""
    if config.sfb_values != IN_UE8M0:
        return p
    return p._replace(sfb=numbers_of(p.sfb, ceil_div(p.k, config.sfb.columns)))


def right_of(config: DecodeConfig, p: DenseProblem) -> Tensor:
    """The D that the reference gives."""
    p = in_numbers(config, p)
    product = reference.block_scaled_product(p.a, p.sfa, p.b, p.sfb, p.of_b, p.of_a)
    return (product if p.c is None else product + p.c.float()).to(p.d.dtype)


def right_and_allowed(config: DecodeConfig, p: DenseProblem, partial_sums: float) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it."""
    right = right_of(config, p)
    return right, allowed_difference(in_numbers(config, p), right, partial_sums)
