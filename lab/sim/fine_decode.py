"""Products of few rows with fine scales: random ones, and the right D."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.casts.by_torch import cast_by_torch
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.problem import Problem

from .product import random_d_and_c, random_words


def random_problem(
    config: DecodeConfig,
    m: int,
    n: int,
    k: int,
    seed: int = 0,
    *,
    in_place: bool = False,
    any_scales: bool = False,
    words: Words = Words.NONE,
) -> Problem:
    """Make a problem with random values, and scales of which no two are alike, or those of some sides in words.

    `any_scales`: scales in words are of any size, or no numbers, here and there.
    """
    generator = torch.Generator().manual_seed(seed)
    a, sfa = cast_by_torch(
        torch.randn(m, k, generator=generator, dtype=torch.float32), config.sfa.rows, config.sfa.columns
    )
    b, sfb = cast_by_torch(
        torch.randn(n, k, generator=generator, dtype=torch.float32), config.sfb.rows, config.sfb.columns
    )

    def varied(side: Words, sf: Tensor) -> Tensor:
        if side not in words:
            return sf * (0.5 + torch.rand(sf.shape, generator=generator, dtype=torch.float32))
        exponents = torch.randint(112, 120, sf.shape, generator=generator, dtype=torch.uint8)
        return random_words(exponents, generator, any_scales)

    sfb, sfa = varied(Words.B, sfb), varied(Words.A, sfa)
    d, c = random_d_and_c(config, (m, n), generator, in_place)
    return Problem(a, sfa, b, sfb, d, c, of_b=config.sfb, of_a=config.sfa)
