"""Products of heads in the simulator, by either kernel, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.recipes import PER_ROW
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
from .library import HostKernel
from .product import Outcome, ProductTrial, depth, draws, random_d_and_c, run, sides

Config = GemmConfig | DecodeConfig


def random_problem(
    config: Config, heads: int, m: int, n: int, k: int, seed: int = 0, *, in_place: bool = False, gap: int = 0
) -> Problem:
    """Make a problem of the form "bhr,hdr->bhd" with random data. D is NaN, unless it is also C.

    Each row of A and B is followed by `gap` other values, a multiple of 16.
    """
    generator = torch.Generator().manual_seed(seed)
    is_per_row = isinstance(config, GemmConfig) and config.sfb == PER_ROW
    a, sfa = per_token_cast_to_fp8(torch.randn(m, heads, k, generator=generator, dtype=torch.float32))
    cast_b = per_token_cast_to_fp8 if is_per_row else per_block_cast_to_fp8
    b, sfb = cast_b(torch.randn(heads, n, k, generator=generator, dtype=torch.float32))
    d, c = random_d_and_c(config, (m, heads, n), generator, in_place)
    recipe = (1, 1, 128) if is_per_row else (1, 128, 128)
    return heads_problem(
        BY_HEADS, (wider(a, gap, torch.nan), sfa), (wider(b, gap, torch.nan), sfb), d, c, (recipe, None, None)
    )


@dataclass(frozen=True)
class HeadsTrial(ProductTrial):
    """Products of some heads by `fp8_gemm`."""

    kernel: ClassVar[Kernel[Any]] = FP8_GEMM
    config: Config
    heads: int = 3
    m: int = 70
    n: int = 136
    k: int = 400
    seed: int = 0
    schedule: str | None = None
    is_dependent: bool = False
    in_place: bool = False

    @classmethod
    def takes(cls, config: Config) -> bool:
        """Take products of heads."""
        return config.work is HEADS

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

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices, in rows of wider ones."""
        sizes = self.heads, self.m, self.n, self.k
        p = random_problem(self.config, *sizes, self.seed, in_place=self.in_place, gap=16)
        return run(kernel, self.config, p, is_dependent=self.is_dependent, **self.how)


class DecodeHeadsTrial(HeadsTrial):
    """The same by `fp8_gemm_decode`."""

    kernel = FP8_GEMM_DECODE


def of_tile(tile: Tile, output: Output, heads: int, m: int, n: int, k: int, *more: Any, **how: Any) -> HeadsTrial:
    """Make the trial of a tile, by the kernel that has it."""
    kind = DecodeHeadsTrial if tile.is_decode else HeadsTrial
    return kind(tile.config(output, k), heads, m, n, k, *more, **how)
