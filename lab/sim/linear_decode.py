"""The `linear_decode` kernel in the simulator, with the source, tensor map and parameters of a GPU's launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.checks import Operand
from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.core.check.recipes import WHOLE
from deep_gemm.gemm.config.decode import DecodeConfig
from deep_gemm.gemm.problem import Problem
from deep_gemm.linear.kernel import KERNEL, LinearDecodeConfig, grid, values_of

from ..casts import wider
from . import product
from .launcher import How, Stage
from .library import HostKernel
from .product import draws, near_edge
from .trial import Trial

TINY = 138 * 2.0**-124, 207 * 2.0**-132
"""A block's largest number, and all other numbers: quotients are ties, and steps of an ordinary cast underflow."""


def run(
    kernel: HostKernel | None,
    config: LinearDecodeConfig,
    x: Tensor,
    w: Operand,
    c: Tensor | None = None,
    *,
    is_dependent: bool = True,
    **how: Unpack[How],
) -> Tensor:
    """Compute C + cast(x) @ w.T on simulated SMs. C may have a stride of 0.

    `is_dependent`: the previous kernel may still run.
    """
    values, scales = w
    d = torch.full((len(x), len(values)), float("nan"), dtype=torch.bfloat16)
    given = {"x": x, "values": values, "scales": scales, "c": c}
    aligned = dict.fromkeys(("x", "values", "c", "d"), 16)
    stage = Stage(config, given, {"d": d}, aligned, ready=() if is_dependent else (*given, "d"), **how)
    stage.run(
        KERNEL,
        kernel,
        lambda at: values_of(config, at["x"], (at["values"], at["scales"]), at["d"], at.get("c")),
        grid(config, *d.shape),
    )
    return d


def cast_weight(w: Tensor, config: LinearDecodeConfig) -> Operand:
    """Cast a weight with the scales that a configuration needs."""
    is_whole = config.tile.sfb == WHOLE
    return per_token_cast_to_fp8(w, gran_k=0) if is_whole else per_block_cast_to_fp8(w)


def by_parts(config: DecodeConfig, x: Tensor, w: Operand, c: Tensor | None, device: str = "cpu") -> Tensor:
    """Compute the cast, then the product with sums that lose the bits that tensor cores cut off."""
    a, sfa = per_token_cast_to_fp8(x, gran_k=config.sfa.columns)
    d = torch.full((len(x), len(w[0])), float("nan"), dtype=torch.bfloat16)
    p = Problem(a, sfa, *w, d, c, of_b=config.sfb, of_a=config.sfa)
    config = replace(config, num_stages=min(config.num_stages, 4))  # in this kernel's tile, stages hold only B
    return product.run(None, config, p, truncate=True, device=device).d


@dataclass(frozen=True)
class LinearTrial(Trial):
    """One layer. `special` numbers occur among ordinary numbers; if there are any, the last row has a block of TINY."""

    kernel = KERNEL
    config: LinearDecodeConfig
    m: int = 7
    n: int = 136
    k: int = 656
    seed: int = 0
    schedule: str | None = None
    special: tuple[float, ...] = ()
    is_dependent: bool = True

    @classmethod
    def drawn(cls, config: LinearDecodeConfig, seed: int) -> LinearTrial:
        """Draw rows for a tile, columns around its edges, and depths of a few groups of casts."""
        draw, tile = draws(config, seed), config.tile
        least = tile.cluster_k if tile.sfa == WHOLE else 1
        blocks = draw.randint(least, 2 * tile.cluster_k * config.group_blocks // tile.block_tokens + 2)
        return cls(
            config,
            draw.randint(1, tile.block_tokens),
            near_edge(draw, tile.block_n * config.cluster_n, 8, blocks=1),
            128 * blocks - 16 * draw.randrange(8),
            seed,
            special=draw.choice(((), (torch.inf, torch.nan, 1e-40, 3e38))),
            is_dependent=draw.random() < 0.5,
            num_sms=config.cluster_size * draw.randint(1, 2),
        )

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare with the cast and the product, bit for bit. The rows of x have gaps."""
        (m, n, k), g = (self.m, self.n, self.k), torch.Generator().manual_seed(self.seed)
        x = torch.randn(m, k, generator=g, dtype=torch.float32).to(torch.bfloat16)
        if self.special:
            x[-1] = 0
            x[-1, 0], x[-1, 1:SCALE_BLOCK] = TINY
        for row, number in enumerate(self.special):
            x[row % m, row * 130 % k] = number
        w = cast_weight(torch.randn(n, k, generator=g, dtype=torch.float32) * torch.logspace(0, 2, k), self.config)
        bias = torch.randn(n, generator=g, dtype=torch.float32)
        of_c = torch.float32 if self.config.tile.c_is_fp32 else torch.bfloat16
        c = bias.to(of_c).expand(m, n) if self.config.tile.with_c else None
        how: How = {**self.how, "truncate": True}
        d = run(kernel, self.config, wider(x, 8, torch.nan), w, c, is_dependent=self.is_dependent, **how)
        right = by_parts(self.config.tile, x, w, c, self.device)
        if not torch.equal(d.view(torch.int16), right.view(torch.int16)):
            raise ValueError(f"{int((d != right).sum())} of {d.numel()} elements differ")
        return 0.0
