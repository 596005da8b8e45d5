"""Products of heads in the simulator, by either kernel, with the source, maps and parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.ask.heads import BY_HEADS, heads_problem
from deep_gemm.gemm.choose.tiles import Tile
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.kinds.output import Output
from deep_gemm.gemm.kinds.works import HEADS
from deep_gemm.gemm.problem import Problem

from ..casts import wider
from .dense import operands
from .product import ProductTrial, depth, draws, random_d_and_c, sides

Config = GemmConfig | DecodeConfig


def random_problem(config: Config, *sizes: Any, **more: Any) -> Problem:
    """Return the problem of a trial with these arguments."""
    return HeadsTrial(config, *sizes, **more).problem()


@dataclass(frozen=True)
class HeadsTrial(ProductTrial):
    """Products of several heads by `fp8_gemm`."""

    kernel: ClassVar[Kernel[Any]] = FP8_GEMM
    works = (HEADS,)
    config: Config
    heads: int = 3
    m: int = 70
    n: int = 136
    k: int = 400
    seed: int = 0
    schedule: str | None = None
    is_dependent: bool = False
    in_place: bool = False
    gap: int = 16
    """Values after each row of A and B, a multiple of 16."""

    @classmethod
    def drawn(cls, config: Config, seed: int) -> HeadsTrial:
        """Draw heads, and sizes around a tile's edges."""
        draw = draws(config, seed)
        return cls(
            config,
            draw.randint(1, 3),
            *sides(draw, config),
            depth(draw, config),
            seed,
            is_dependent=draw.random() < 0.5,
            in_place=config.with_c and not config.is_fp32 and draw.random() < 0.5,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def problem(self) -> Problem:
        """Draw operands for "bhr,hdr->bhd". D is NaN, unless it is also C."""
        generator = torch.Generator().manual_seed(self.seed)
        a, b = operands(self.config, generator, (self.m, self.heads), self.n, self.k, (self.heads,))
        d, c = random_d_and_c(self.config, (self.m, self.heads, self.n), generator, self.in_place)
        a, b = ((wider(values, self.gap, torch.nan), scales) for values, scales in (a, b))
        return heads_problem(BY_HEADS, a, b, d, c, (None, self.config.sfa, self.config.sfb))


class DecodeHeadsTrial(HeadsTrial):
    """Products of several heads by `fp8_gemm_decode`."""

    kernel = FP8_GEMM_DECODE


def of_tile(tile: Tile, output: Output, heads: int, m: int, n: int, k: int, *more: Any, **how: Any) -> HeadsTrial:
    """Make the trial of a tile, for the kernel that has this tile."""
    kind = DecodeHeadsTrial if tile.is_decode else HeadsTrial
    return kind(tile.config(output, k), heads, m, n, k, *more, **how)
