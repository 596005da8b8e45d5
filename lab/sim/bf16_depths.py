"""Groups along k of BF16 in the simulator, with the source, tensor maps and parameters that a GPU gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.gemm.bf16 import depths as kernels
from deep_gemm.gemm.bf16.config import BLOCK_K, Bf16Config
from deep_gemm.gemm.bf16.counted import CountedProblem
from deep_gemm.gemm.bf16.depths import DepthsProblem
from deep_gemm.gemm.bf16.kernel import KERNEL as BF16_GEMM
from deep_gemm.gemm.output import Groups

from .bf16 import Problem, right_and_allowed
from .dense import Outcome, ProductTrial, outcome
from .launcher import How
from .library import HostKernel
from .product import draws, random_d_and_c, run_plan, sides, stage_of, units_of_step


def random_problem(config: Bf16Config, ks: Sequence[int], m: int, n: int, seed: int = 0) -> DepthsProblem:
    """Make a problem with random data. D is NaN, unless it is also C."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(sum(ks), rows, generator=generator, dtype=torch.float32).to(torch.bfloat16) for rows in (m, n))
    d, c = random_d_and_c(config, (len(ks), m, n), generator)
    return DepthsProblem(a, b, d, c, tuple(ks))


def run(kernel: HostKernel | None, config: Bf16Config, p: DepthsProblem, **how: Unpack[How]) -> Outcome:
    """Compute on simulated SMs and in FP64."""
    right, allowed = right_and_allowed_of_groups(p, p.ks, units_of_step(how))
    result = run_plan(kernel, BF16_GEMM, config, p, kernels.plans_of, stage_of(config, p, **how))
    return outcome(result, right, allowed, (config.block_m, config.block_n))


def right_and_allowed_of_groups(
    p: DepthsProblem | CountedProblem, ks: Sequence[int], of_step: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The right D of all groups, and how far each element may be from it."""
    parts, first = [], 0
    for group, k in enumerate(ks):
        a, b = p.a[first : first + k].mT, p.b[first : first + k].mT
        of_group = Problem(a, b, p.d[group], None if p.c is None else p.c[group])
        parts.append(right_and_allowed(of_group, 1, of_step))
        first += k
    right, allowed = (torch.stack(each) for each in zip(*parts, strict=True))
    return right, allowed


@dataclass(frozen=True)
class Bf16DepthsTrial(ProductTrial):
    """One list of depths."""

    kernel = BF16_GEMM
    config: Bf16Config
    ks: tuple[int, ...] = (128, 0, 256, 64)
    m: int = 136
    n: int = 72
    seed: int = 0
    schedule: str | None = None

    @classmethod
    def takes(cls, config: Bf16Config) -> bool:
        """Take groups along k that the host knows."""
        return config.groups == Groups.DEPTHS

    @classmethod
    def drawn(cls, config: Bf16Config, seed: int) -> Bf16DepthsTrial:
        """Draw depths, some of them zero, and sizes around a tile's edges."""
        draw = draws(config, seed)
        return cls(
            config,
            (*(BLOCK_K * draw.randint(0, 3) for _ in range(draw.randint(0, 4))), BLOCK_K),
            *sides(draw, config, of_m=8, of_n=8),
            seed,
            num_sms=config.cluster_size * draw.randint(1, 3),
        )

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply random matrices."""
        return run(kernel, self.config, random_problem(self.config, self.ks, self.m, self.n, self.seed), **self.how)
