"""BF16 groups along k in the simulator, with the source, tensor maps and parameters of a GPU's launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import Unpack

from deep_gemm.gemm import bf16_depths as kernels
from deep_gemm.gemm.config.bf16 import BLOCK_K, Bf16Config
from deep_gemm.gemm.kernel import BF16_GEMM
from deep_gemm.gemm.kinds.works import PARTS
from deep_gemm.gemm.problem import Problem

from .bf16 import operand
from .launcher import How
from .library import HostKernel
from .product import Outcome, ProductTrial, draws, outcome, random_d_and_c, right_and_allowed, sides, stage_of, tile_of


def run(
    kernel: HostKernel | None, config: Bf16Config, p: Problem, *, ks: Sequence[int] | None = None, **how: Unpack[How]
) -> Outcome:
    """Compute on simulated SMs and in FP64. `ks`: the right depths if the problem's are wrong."""
    right, allowed = right_and_allowed(p, how, config, ks)
    stage = stage_of(config, p, **how)
    with stage.launches({BF16_GEMM: kernel}):
        kernels.start_parts(stage.placed(p), config, stage.num_sms)
    return outcome(stage.result(), right, allowed, tile_of(config))


@dataclass(frozen=True)
class Bf16DepthsTrial(ProductTrial):
    """One list of depths."""

    kernel = BF16_GEMM
    works = (PARTS,)
    config: Bf16Config
    ks: tuple[int, ...] = (128, 0, 256, 64)
    m: int = 136
    n: int = 72
    seed: int = 0
    schedule: str | None = None

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

    def problem(self) -> Problem:
        """Draw random matrices. D is NaN, unless it is also C."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = (self.m, self.n)
        a, b = (operand((sum(self.ks), rows), False, 0, generator).mT for rows in sizes)
        d, c = random_d_and_c(self.config, (len(self.ks), *sizes), generator)
        return Problem(a, None, b, None, d, c, PARTS, None, None, ks=self.ks)

    def outcome(self, kernel: HostKernel | None = None) -> Outcome:
        """Multiply group by group."""
        return run(kernel, self.config, self.problem(), **self.how)
