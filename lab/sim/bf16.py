"""BF16 products in the simulator, with the source, tensor maps and parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deep_gemm.gemm.config.bf16 import BLOCK_K, Bf16Config
from deep_gemm.gemm.kernel import BF16_GEMM
from deep_gemm.gemm.kinds.works import DENSE, HEADS
from deep_gemm.gemm.problem import Problem

from .product import ProductTrial, draws, random_d_and_c, sides


def operand(shape: tuple[int, ...], is_mn: bool, gap: int, generator: torch.Generator, exact: bool = False) -> Tensor:
    """Make random rows, each followed by `gap` NaNs; `is_mn`: make a matrix whose columns are contiguous."""
    shape = (*shape[:-2], shape[-1], shape[-2]) if is_mn else shape
    wide = torch.full((*shape[:-1], -(-shape[-1] // 8) * 8 + gap), float("nan"), dtype=torch.bfloat16)
    values = (
        torch.randint(-2, 3, shape, generator=generator)
        if exact
        else torch.randn(shape, generator=generator, dtype=torch.float32)
    )
    x = wide[..., : shape[-1]].copy_(values)
    return x.mT if is_mn else x


def random_problem(config: Bf16Config, *sizes: Any, **more: Any) -> Problem:
    """Return the problem of a trial with these arguments."""
    return Bf16Trial(config, *sizes, **more).problem()


@dataclass(frozen=True)
class Bf16Trial(ProductTrial):
    """One product, or products of several heads."""

    kernel = BF16_GEMM
    works = (DENSE, HEADS)
    config: Bf16Config
    m: int = 200
    n: int = 136
    k: int = 456
    seed: int = 0
    schedule: str | None = None
    in_place: bool = False
    is_dependent: bool = False
    planes: int = 2
    """The number of heads, if the configuration has heads."""
    gap: int = 8
    """NaNs after each row, a multiple of 8."""
    exact: bool = False
    """True: the operands are small integers, so that no sum is rounded."""

    @classmethod
    def drawn(cls, config: Bf16Config, seed: int) -> Bf16Trial:
        """Draw sizes around a tile's edges, any size for non-contiguous axes. Each slice has at least one k-block."""
        draw = draws(config, seed)
        blocks = draw.randint(config.slices, 2 * config.slices + 2)
        return cls(
            config,
            *sides(draw, config, of_m=8 if config.majors.a_is_mn else 1, of_n=8),
            blocks * BLOCK_K - draw.choice((0, 8 * draw.randrange(8))),
            seed,
            in_place=config.with_c and not config.is_fp32 and draw.random() < 0.5,
            is_dependent=draw.random() < 0.5,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def problem(self) -> Problem:
        """Draw random matrices. D is NaN, unless it is also C."""
        config, generator = self.config, torch.Generator().manual_seed(self.seed)
        lead = (self.planes,) if config.work.has_planes else ()
        a = operand((*lead, self.m, self.k), config.majors.a_is_mn, self.gap, generator, self.exact)
        b = operand((*lead, self.n, self.k), config.majors.b_is_mn, self.gap, generator, self.exact)
        d, c = random_d_and_c(config, (*lead, self.m, self.n), generator, self.in_place)
        c = c if c is None else c.expand(d.shape)
        return Problem(a, None, b, None, d, c, config.work, None, None)
