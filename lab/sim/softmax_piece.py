"""The `softmax_piece` kernel in the simulator, with the source and parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm import softmax_piece
from deep_gemm.gemm.softmax_piece import BLOCK, SoftmaxConfig

from .launcher import Stage
from .library import HostKernel
from .rounding import largest_part, within_units
from .trial import Trial

FIRST, SCALE = 1000, 0.75
FEW_UNITS = 5e-6
"""Allowed error of a logarithm of a sum, and relative error of a probability: both have a few FP32 roundings."""


@dataclass(frozen=True)
class SoftmaxTrial(Trial):
    """A piece of logits with a small block, a block of -inf and a large logit; tokens are before, in and after it."""

    kernel = softmax_piece.KERNEL
    config: SoftmaxConfig
    rows: int = 5
    columns: int = 300
    seed: int = 0
    schedule: str | None = None

    @classmethod
    def drawn(cls, config: SoftmaxConfig, seed: int) -> SoftmaxTrial:
        """Draw rows, and columns around the size of one chunk and of several."""
        draw = random.Random(seed)
        columns = draw.choice([4, 124, 128, 132, 2044, 2048, 2052, 4500, 6148])
        return cls(config, draw.randint(1, 9), columns, seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare with FP64, and chosen logits bit for bit."""
        generator, (m, n) = torch.Generator().manual_seed(self.seed), (self.rows, self.columns)
        logits = torch.randn(m, n, generator=generator, dtype=torch.float32) * 4
        logits[0, :BLOCK], logits[-1, n // 2 | 1] = -300, 300
        logits[0, BLOCK : 2 * BLOCK] = -torch.inf  # a block of impossible tokens
        at = torch.randint(0, n, (m,), generator=generator)
        at[1:3] = torch.tensor([-1 - FIRST, n], dtype=at.dtype)[: m - 1]
        read = {"tokens": (at + FIRST).int()}
        scaled, is_here = logits * SCALE, (at >= 0) & (at < n)
        if self.config.is_backward:
            factors = torch.randn(m, generator=generator, dtype=torch.float32)
            read |= {"lse": torch.logsumexp(scaled, 1), "factors": factors}
            stage = Stage(self.config, read, {"logits": logits}, {"logits": 16}, **self.how)
            with stage.launches({self.kernel: kernel}):
                softmax_piece.run(self.config, scale=SCALE, first=FIRST, **stage.at)
            onehot = F.one_hot(at.clamp(0, n - 1), n) * is_here[:, None]
            softmax, by = (scaled.double() - read["lse"].double()[:, None]).exp(), factors.double()[:, None]
            exact = ((onehot - softmax) * by).bfloat16()
            gradient = stage.result().buffers["logits"].view(torch.bfloat16)[:, :n]
            return largest_part("gradient", gradient, exact, within_units(exact, FEW_UNITS * softmax * by.abs()))
        sums = torch.full((m, ceil_div(n, BLOCK) + 3), torch.nan, dtype=torch.float32)  # three spare columns
        written = {"sums": sums, "chosen": sums[:, 0].clone()}
        stage = Stage(self.config, {**read, "logits": logits}, written, {"logits": 16}, **self.how)
        with stage.launches({self.kernel: kernel}):
            softmax_piece.run(self.config, scale=SCALE, first=FIRST, **stage.at)
        got, right = stage.result().buffers, sums.double()
        blocks = F.pad(scaled.double(), (0, -n % BLOCK), value=-torch.inf).view(m, -1, BLOCK)
        right[:, :-3] = torch.logsumexp(blocks, 2)
        picked = scaled.gather(1, at.clamp(0, n - 1)[:, None])[:, 0].masked_fill(~is_here, torch.nan)
        largest_part("chosen", got["chosen"], picked, torch.zeros(m, dtype=torch.float32))
        units = torch.tensor(FEW_UNITS, dtype=torch.float32)
        return largest_part("sums", got["sums"], right, within_units(right.float(), units))
