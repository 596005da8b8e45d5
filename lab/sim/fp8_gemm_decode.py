"""The `fp8_gemm_decode` kernel in the simulator, with the source, tensor maps and parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import align
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.kernel import FP8_GEMM_DECODE
from deep_gemm.gemm.problem import Problem

from ..casts import cast_by_torch
from .dense import DenseTrial
from .product import depth, draws, random_words, sides


def random_problem(config: DecodeConfig, *sizes: Any, **more: Any) -> Problem:
    """Return the problem of a trial with these arguments."""
    return DecodeTrial(config, *sizes, **more).problem()


@dataclass(frozen=True)
class DecodeTrial(DenseTrial):
    """One product with few rows."""

    kernel = FP8_GEMM_DECODE
    config: DecodeConfig
    m: int = 13
    n: int = 200
    k: int = 1296
    weight_is_ready: bool = False

    @classmethod
    def drawn(cls, config: Any, seed: int) -> DecodeTrial:
        """Draw sizes around a tile's edges."""
        draw = draws(config, seed)
        is_dependent, k = draw.random() < 0.5, depth(draw, config)
        words = Words(draw.randint(0, 3)) if config.is_fine else Words.NONE
        return cls(
            config,
            *sides(draw, config, blocks=2),
            align(k, 32) if config.is_fp4 else k,
            seed,
            is_dependent=is_dependent,
            in_place=config.with_c and draw.random() < 0.5,
            weight_is_ready=is_dependent and draw.random() < 0.5,
            any_scales=(config.is_fp4 or words != Words.NONE) and draw.random() < 0.5,
            words=words,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def operands(self, generator: torch.Generator) -> tuple[Operand, Operand]:
        """Draw A and B; if scales are fine, no two scales are equal."""
        if not self.config.is_fine:
            return super().operands(generator)
        (a, sfa), (b, sfb) = (
            cast_by_torch(torch.randn(rows, self.k, generator=generator, dtype=torch.float32), *of)
            for rows, of in ((self.m, self.config.sfa), (self.n, self.config.sfb))
        )
        sfb = self._varied(Words.B, sfb, generator)
        return (a, self._varied(Words.A, sfa, generator)), (b, sfb)

    def _varied(self, side: Words, sf: Tensor, generator: torch.Generator) -> Tensor:
        if side not in self.words:
            return sf * (0.5 + torch.rand(sf.shape, generator=generator, dtype=torch.float32))
        exponents = torch.randint(112, 120, sf.shape, generator=generator, dtype=torch.uint8)
        return random_words(exponents, generator, self.any_scales)
