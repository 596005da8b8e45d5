"""The kernels `gather_weighted` and `gather_weighted_many` in the simulator, with the parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.core.kernel import Kernel
from deep_gemm.moe import gather_weighted
from deep_gemm.moe.gather_weighted import KERNEL, MANY, GatherConfig, ManyConfig
from deep_gemm.moe.routing import weighted_sum

from .launcher import How, Stage
from .library import HostKernel
from .trial import Trial, same


def kernel_of(config: GatherConfig | ManyConfig) -> Kernel[Any]:
    """Return the kernel of a configuration."""
    return MANY if isinstance(config, ManyConfig) else KERNEL


def run(
    kernel: HostKernel | None,
    config: GatherConfig | ManyConfig,
    y: Tensor,
    row_of: Tensor,
    weights: Tensor | None,
    **how: Unpack[How],
) -> Tensor:
    """Sum up each token's rows on simulated SMs. Elements that the kernel does not write are NaN."""
    out = torch.full((row_of.shape[0], y.shape[1]), float("nan"), dtype=torch.bfloat16)
    given = {"y": y, "row_of": row_of, "weights": weights}
    stage = Stage(config, given, {"out": out}, {"y": 16, "out": 16}, **how)
    grid = stage.num_sms if isinstance(config, ManyConfig) else gather_weighted.grid(config, *out.shape)
    stage.run(
        kernel_of(config),
        kernel,
        lambda at: gather_weighted.values_of(at["y"], at["row_of"], at.get("weights"), at["out"]),
        grid,
    )
    return out


@dataclass(frozen=True)
class GatherTrial(Trial):
    """Sums of random rows by the kernel for few tokens; some routes have no row."""

    kernel: ClassVar[Kernel[Any]] = KERNEL
    config: GatherConfig | ManyConfig
    tokens: int
    topk: int
    n: int
    seed: int = 0
    schedule: str | None = None

    @classmethod
    def drawn(cls, config: GatherConfig | ManyConfig, seed: int) -> GatherTrial:
        """Draw sizes."""
        draw = random.Random(seed)
        return cls(config, draw.randint(1, 9), draw.randint(1, 40), 8 * draw.choice((1, 5, 257, 520)), seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare sums with a loop over routes, bit for bit."""
        generator = torch.Generator().manual_seed(self.seed)
        # Terms of all magnitudes cancel each other, so the rounding of each step shows in the sum.
        magnitudes = 2.0 ** torch.randint(0, 24, (self.tokens * self.topk, 1), generator=generator)
        y = (
            torch.randn(self.tokens * self.topk, self.n, generator=generator, dtype=torch.float32) * magnitudes
        ).bfloat16()
        y[1::2] = -y[: len(y) // 2 * 2 : 2]
        row_of = torch.arange(y.shape[0], dtype=torch.int32).view(self.tokens, self.topk).roll(1, 1)
        row_of[torch.rand(row_of.shape, generator=generator, dtype=torch.float32) < 0.2] = -1
        weights = None
        if self.config.weights is not None:  # in wider rows, like a message's
            weights = torch.rand(self.tokens, self.topk + 3, generator=generator, dtype=torch.float32).to(
                self.config.weights
            )[:, 2:-1]
            weights[: self.tokens // 2] = 0.7
            weights[row_of < 0] = float("nan")
        wide = torch.full(
            (len(y), self.n + 8), torch.nan, dtype=torch.float32
        ).bfloat16()  # NaN beside the rows, and in unused rows
        taken = row_of[row_of >= 0].long()
        wide[taken, : self.n] = y[taken]
        y = wide[:, : self.n]
        found = run(kernel, self.config, y, row_of, weights, **self.how)
        right = weighted_sum(y, row_of, weights).bfloat16()
        same("sums", found, right)
        return 0.0


@dataclass(frozen=True)
class ManyTrial(GatherTrial):
    """Sums of random rows by the kernel for many tokens."""

    kernel = MANY
