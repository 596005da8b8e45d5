"""Products that write parts of heads in the simulator: both kernels, with the parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from deep_gemm.core.check.recipes import NO_RECIPES
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.ask.heads import skip_problem
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.problem import Problem

from .dense import operands
from .product import ProductTrial, depth, draws, sides

Config = GemmConfig | DecodeConfig
UNTOUCHED = 42.0


@dataclass(frozen=True)
class SkipTrial(ProductTrial):
    """One product by `fp8_gemm` that writes the left and right part of each head, and skips the middle."""

    kernel: ClassVar[Kernel[Any]] = FP8_GEMM
    config: Config
    m: int = 133
    heads: int = 3
    splits: tuple[int, int, int] = (128, 64, 64)
    seed: int = 0
    schedule: str | None = None
    k: int = 272
    is_dependent: bool = False

    @classmethod
    def takes(cls, config: Config) -> bool:
        """Accept products that skip columns."""
        return config.epilogue.skips_mid

    @classmethod
    def drawn(cls, config: Config, seed: int) -> SkipTrial:
        """Draw rows around a tile's edges, parts of whole panels, and slightly more heads than a tile holds."""
        draw = draws(config, seed)
        panel = 16 if isinstance(config, DecodeConfig) else config.panel_columns
        left, right = (panel * draw.randint(1, 128 // panel) for _ in range(2))
        return cls(
            config,
            sides(draw, config)[0],
            draw.randint(1, config.block_n // (left + right) + 1),
            (left, 8 * draw.randint(0, 16), right),
            seed,
            k=depth(draw, config),
            is_dependent=draw.random() < 0.5,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def problem(self) -> Problem:
        """Draw random matrices. All of D is a canary, and its rows are longer than its columns."""
        left, mid, right = self.splits
        n, columns = (left + right) * self.heads, (left + mid + right) * self.heads
        a, b = operands(self.config, torch.Generator().manual_seed(self.seed), (self.m,), n, self.k)
        d = torch.full((self.m, columns + 16), UNTOUCHED, dtype=torch.bfloat16)[:, :columns]
        return skip_problem(a, b, d, self.splits, recipes=NO_RECIPES)


class DecodeSkipTrial(SkipTrial):
    """One product by `fp8_gemm_decode` that writes the left and right part of each head, and skips the middle."""

    kernel = FP8_GEMM_DECODE


def of_config(config: Config, *more: Any, **how: Any) -> SkipTrial:
    """Make the trial of a configuration, for its kernel."""
    return (DecodeSkipTrial if isinstance(config, DecodeConfig) else SkipTrial)(config, *more, **how)
