"""Products into the parts of heads in the simulator: both kernels, with the parameters that a GPU gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm.ask.skip import skip_problem
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import FP8_GEMM, FP8_GEMM_DECODE
from deep_gemm.gemm.problem import Problem

from .library import HostKernel
from .product import Outcome, ProductTrial, depth, draws, run, sides

Config = GemmConfig | DecodeConfig
UNTOUCHED = 42.0


def random_problem(
    m: int, n: int, k: int, head_splits: tuple[int, int, int], seed: int = 0, *, extra_columns: int = 0
) -> Problem:
    """Make a problem with random data. All of D is a canary, in rows that have some columns more."""
    generator = torch.Generator().manual_seed(seed)
    a = per_token_cast_to_fp8(torch.randn(m, k, generator=generator, dtype=torch.float32))
    b = per_block_cast_to_fp8(torch.randn(n, k, generator=generator, dtype=torch.float32))
    columns = n // (head_splits[0] + head_splits[2]) * sum(head_splits)
    d = torch.full((m, columns + extra_columns), UNTOUCHED, dtype=torch.bfloat16)[:, :columns]
    return skip_problem(a, b, d, head_splits, recipes=(None, None, None))


@dataclass(frozen=True)
class SkipTrial(ProductTrial):
    """One product into parts of heads, by `fp8_gemm`."""

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
        """Take products that skip columns."""
        return config.epilogue.skips_mid

    @classmethod
    def drawn(cls, config: Config, seed: int) -> SkipTrial:
        """Draw rows around a tile's edges, parts of whole panels, and heads for a tile and a bit."""
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

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices; rows of D go on behind its last column."""
        n = (self.splits[0] + self.splits[2]) * self.heads
        p = random_problem(self.m, n, self.k, self.splits, self.seed, extra_columns=16)
        return run(kernel, self.config, p, is_dependent=self.is_dependent, **self.how)


class DecodeSkipTrial(SkipTrial):
    """The same by `fp8_gemm_decode`."""

    kernel = FP8_GEMM_DECODE


def of_config(config: Config, *more: Any, **how: Any) -> SkipTrial:
    """Make the trial of a configuration, by its kernel."""
    return (DecodeSkipTrial if isinstance(config, DecodeConfig) else SkipTrial)(config, *more, **how)
