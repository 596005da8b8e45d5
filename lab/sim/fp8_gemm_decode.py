"""The `fp8_gemm_decode` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from deep_gemm.core.check.layout import align
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.kernel import FP8_GEMM_DECODE
from deep_gemm.gemm.kinds.works import DENSE

from . import fine_decode
from .dense import random_problem
from .library import HostKernel
from .product import Outcome, ProductTrial, depth, draws, run, sides


@dataclass(frozen=True)
class DecodeTrial(ProductTrial):
    """One product of few rows."""

    kernel = FP8_GEMM_DECODE
    config: DecodeConfig
    m: int = 13
    n: int = 200
    k: int = 1296
    seed: int = 0
    schedule: str | None = None
    is_dependent: bool = False
    in_place: bool = False
    weight_is_ready: bool = False
    any_scales: bool = False
    """Scales of an FP4 weight that do not always fold, or fine ones in words that are anything."""
    words: Words = Words.NONE
    """Sides whose fine scales are words."""

    @classmethod
    def takes(cls, config: DecodeConfig) -> bool:
        """Take products without heads."""
        return config.work is DENSE and not config.epilogue.skips_mid

    @classmethod
    def drawn(cls, config: DecodeConfig, seed: int) -> DecodeTrial:
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

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices."""
        random = partial(fine_decode.random_problem, words=self.words) if self.config.is_fine else random_problem
        p = random(self.config, self.m, self.n, self.k, self.seed, in_place=self.in_place, any_scales=self.any_scales)
        return run(
            kernel, self.config, p, is_dependent=self.is_dependent, weight_is_ready=self.weight_is_ready, **self.how
        )
