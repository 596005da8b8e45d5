"""Products into the parts of heads in the simulator: both kernels, with the parameters that a GPU gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm import kernel as fp8_gemm
from deep_gemm.gemm import kernel_decode as fp8_gemm_decode
from deep_gemm.gemm import reference
from deep_gemm.gemm.config import GemmConfig
from deep_gemm.gemm.config_decode import DecodeConfig
from deep_gemm.gemm.dense.check import DenseProblem
from deep_gemm.gemm.skip import launch as kernels
from deep_gemm.gemm.skip.check import SkipProblem, parts, skip_problem

from .dense import Outcome, ProductTrial, outcome
from .fp8_gemm_decode import ALIGNMENTS
from .launcher import How
from .library import HostKernel
from .product import depth, draws, partial_sums, run_plan, sides, stage_of
from .rounding import EXACT_STEPS, allowed_difference

Config = GemmConfig | DecodeConfig
UNTOUCHED = 42.0


def random_problem(
    m: int, n: int, k: int, head_splits: tuple[int, int, int], seed: int = 0, *, extra_columns: int = 0
) -> SkipProblem:
    """Make a problem with random data. All of D is a canary, in rows that have some columns more."""
    generator = torch.Generator().manual_seed(seed)
    a = per_token_cast_to_fp8(torch.randn(m, k, generator=generator, dtype=torch.float32))
    b = per_block_cast_to_fp8(torch.randn(n, k, generator=generator, dtype=torch.float32))
    columns = n // (head_splits[0] + head_splits[2]) * sum(head_splits)
    d = torch.full((m, columns + extra_columns), UNTOUCHED, dtype=torch.bfloat16)[:, :columns]
    return skip_problem(a, b, d, head_splits, recipes=(None, None, None))


def run(
    kernel: HostKernel | None, config: Config, p: SkipProblem, *, is_dependent: bool = False, **how: Unpack[How]
) -> Outcome:
    """Compute a product on simulated SMs and with the reference. All of D must be right, columns between parts too."""
    p = kernels.prepared(config, p)
    alignments = ALIGNMENTS if isinstance(config, DecodeConfig) else {"sfb": 4}
    of, stage = fp8_gemm_decode.kernel_of(config), stage_of(config, p, alignments, is_dependent=is_dependent, **how)
    return outcome(run_plan(kernel, of, config, p, kernels.plan_of, stage), *right_and_allowed(p, partial_sums(how)))


def plain(p: SkipProblem) -> DenseProblem:
    """The product as a matrix of its own."""
    d = torch.empty(p.m, p.n, dtype=p.d.dtype)
    return DenseProblem(p.a, p.sfa, p.b, p.sfb, d, None, p.m, p.n, p.k, p.of_b)


def right_and_allowed(p: SkipProblem, partial_sums: float = EXACT_STEPS) -> tuple[Tensor, Tensor]:
    """The right D, and how far each element may be from it: not at all between the parts."""
    right, allowed = torch.full_like(p.d, UNTOUCHED), torch.full(p.d.shape, 1e-30, dtype=torch.float64)
    reference.skip_head_mid(p._replace(d=right))
    matrix = plain(p)
    reference.dense(matrix)
    of_heads = allowed_difference(matrix, matrix.d, partial_sums).view(p.m, p.n // p.heads.columns, p.heads.columns)
    left_part, right_part = parts(allowed, p.heads)
    left_part.copy_(of_heads[..., : p.heads.left])
    right_part.copy_(of_heads[..., p.heads.left :])
    return right, allowed


@dataclass(frozen=True)
class SkipTrial(ProductTrial):
    """One product into parts of heads, by `fp8_gemm`."""

    kernel: ClassVar[Kernel[Any]] = fp8_gemm.KERNEL
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
        return config.skips_mid

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

    kernel = fp8_gemm_decode.KERNEL


def of_config(config: Config, *more: Any, **how: Any) -> SkipTrial:
    """Make the trial of a configuration, by its kernel."""
    return (DecodeSkipTrial if isinstance(config, DecodeConfig) else SkipTrial)(config, *more, **how)
