"""The `fp8_gemm_decode` kernel for E4M3 weights with fine scales in the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.by_torch import cast_by_torch
from deep_gemm.casts.scales import words_of
from deep_gemm.core.check.layout import UE8M0_PER_WORD, ceil_div
from deep_gemm.core.check.recipes import IN_UE8M0, Scales
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm import reference
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.packed import numbers_of

from .dense import Outcome, ProductTrial, outcome
from .fp8_gemm_decode import ALIGNMENTS
from .launcher import How
from .library import HostKernel
from .product import depth, draws, partial_sums, random_d_and_c, run_plan, sides, stage_of
from .rounding import allowed_difference

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
    return DenseProblem(a, sfa, b, sfb, d, c, m, n, k, config.sfb)


def of_one_depth(config: DecodeConfig, p: DenseProblem) -> tuple[DenseProblem, Scales]:
    """Give the problem in FP32 scales, those of A of as few columns as the finer side has; and how A is scaled then."""
    columns = min(config.sfa.columns, config.sfb.columns)
    sfa = p.sfa.repeat_interleave(config.sfa.columns // columns, 1)[:, : ceil_div(p.k, columns)]
    sfb = numbers_of(p.sfb, ceil_div(p.k, columns)) if config.sfb_values == IN_UE8M0 else p.sfb
    return p._replace(sfa=sfa, sfb=sfb), Scales(1, columns)


def right_of(config: DecodeConfig, p: DenseProblem) -> Tensor:
    """The D that the reference gives."""
    p, of_a = of_one_depth(config, p)
    product = reference.block_scaled_product(p.a, p.sfa, p.b, p.sfb, p.of_b, of_a)
    return (product if p.c is None else product + p.c.float()).to(p.d.dtype)


def run(
    kernel: HostKernel | None,
    config: DecodeConfig,
    p: DenseProblem,
    *,
    is_dependent: bool = False,
    weight_is_ready: bool = False,
    **how: Unpack[How],
) -> Outcome:
    """Compute a product on simulated SMs and with the reference; see lab/sim/fp8_gemm_decode.py."""
    ready = ("b",) if weight_is_ready else ()
    stage = stage_of(config, p, ALIGNMENTS, is_dependent=is_dependent, ready=ready, **how)
    right, (plain, of_a) = right_of(config, p), of_one_depth(config, p)
    result = run_plan(
        kernel,
        fp8_gemm_decode.KERNEL,
        config,
        p,
        lambda at, _, __, launcher: fp8_gemm_decode.plan_of(at, config, launcher, weight_is_ready=weight_is_ready),
        stage,
    )
    allowed = allowed_difference(plain, right, partial_sums(how), of_a)
    return outcome(result, right, allowed, (config.block_tokens, config.block_n))


@dataclass(frozen=True)
class FineDecodeTrial(ProductTrial):
    """One product of few rows, with fine scales."""

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
    """Scales in words are of any size, or no numbers, here and there."""

    @classmethod
    def takes(cls, config: DecodeConfig) -> bool:
        """Take fine scales of one product."""
        return config.is_fine and not (config.has_heads or config.skips_mid)

    @classmethod
    def drawn(cls, config: DecodeConfig, seed: int) -> FineDecodeTrial:
        """Draw sizes around a tile's edges."""
        draw = draws(config, seed)
        is_dependent = draw.random() < 0.5
        return cls(
            config,
            *sides(draw, config, blocks=2),
            depth(draw, config),
            seed,
            is_dependent=is_dependent,
            in_place=config.with_c and draw.random() < 0.5,
            weight_is_ready=is_dependent and draw.random() < 0.5,
            any_scales=config.sfb_values == IN_UE8M0 and draw.random() < 0.5,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices."""
        p = random_problem(
            self.config, self.m, self.n, self.k, self.seed, in_place=self.in_place, any_scales=self.any_scales
        )
        return run(
            kernel, self.config, p, is_dependent=self.is_dependent, weight_is_ready=self.weight_is_ready, **self.how
        )
