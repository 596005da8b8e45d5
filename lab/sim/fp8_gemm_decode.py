"""The `fp8_gemm_decode` kernel in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import Unpack

from deep_gemm.core.check.layout import align
from deep_gemm.core.check.ue8m0 import Words
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.output import Groups
from deep_gemm.gemm.plan import Plan

from . import fine_decode
from .dense import Outcome, ProductTrial, outcome, random_problem, right_and_allowed
from .launcher import How
from .library import HostKernel
from .product import depth, draws, partial_sums, run_plan, sides, stage_of

ALIGNMENTS = {"sfa": 4, "sfb": 4}
"""Least alignment of scales, which the kernel reads as floats."""


def run(
    kernel: HostKernel | None,
    config: DecodeConfig,
    p: DenseProblem,
    *,
    is_dependent: bool = False,
    weight_is_ready: bool = False,
    **how: Unpack[How],
) -> Outcome:
    """Compute a product on simulated SMs and with the reference.

    `is_dependent`: the kernel ahead may still run. `weight_is_ready`: B is not what it writes, and the kernel may know.
    """
    ready = ("b",) if weight_is_ready else ()
    stage = stage_of(config, p, ALIGNMENTS, is_dependent=is_dependent, ready=ready, **how)

    def plan_of(placed: DenseProblem, _: DecodeConfig, num_sms: int, launcher: Any) -> Plan:
        return fp8_gemm_decode.plan_of(placed, config, launcher, weight_is_ready=weight_is_ready)

    result = run_plan(kernel, fp8_gemm_decode.KERNEL, config, p, plan_of, stage)
    return outcome(result, *right_and_allowed(p, partial_sums(how)), (config.block_tokens, config.block_n))


@dataclass(frozen=True)
class DecodeTrial(ProductTrial):
    """One product of few rows."""

    kernel = fp8_gemm_decode.KERNEL
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
        return config.groups == Groups.NONE and not config.skips_mid

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
