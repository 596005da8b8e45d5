"""Products that also add up blocks of D's columns, in the simulator, with the sources and parameters of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.core.kernel import Kernel
from deep_gemm.gemm import launch, reference
from deep_gemm.gemm.ask.dense import block_sums_problem
from deep_gemm.gemm.config.tall import GemmConfig
from deep_gemm.gemm.kernel import BF16_GEMM, FP8_GEMM
from deep_gemm.gemm.problem import Problem
from deep_gemm.gemm.softmax_piece import BLOCK

from .bf16 import operand
from .dense import operands
from .library import HostKernel
from .product import depth, draws, exact_and_allowed, partial_sums, sides, stage_of, units_of_step
from .rounding import allowed_difference, largest_part, within_units
from .softmax_piece import FEW_UNITS, FIRST, SCALE
from .trial import Trial


@dataclass(frozen=True)
class BlockSumsTrial(Trial):
    """One product by `fp8_gemm`, and tokens whose ids are among the product's columns, before or behind them."""

    kernel: ClassVar[Kernel[Any]] = FP8_GEMM
    config: GemmConfig
    m: int = 200
    n: int = 328
    k: int = 256
    seed: int = 0
    schedule: str | None = None

    @classmethod
    def takes(cls, config: Any) -> bool:
        """Accept products that add up blocks."""
        return bool(config.epilogue.sums_blocks)

    @classmethod
    def drawn(cls, config: Any, seed: int) -> BlockSumsTrial:
        """Draw sizes around a tile's edges."""
        draw = draws(config, seed)
        m, n = sides(draw, config, of_n=8)
        return cls(config, m, n, depth(draw, config), seed, num_sms=config.cluster_size * draw.randint(1, 3))

    def problem(self) -> Problem:
        """Draw operands and tokens. Results are NaN, and so are three numbers behind each row of sums."""
        config, generator = self.config, torch.Generator().manual_seed(self.seed)
        recipes, given = None, (generator, (self.m,), self.n, self.k)
        if config.sfa is None or config.sfb is None:
            a: Any = operand((self.m, self.k), False, 8, generator)
            b: Any = operand((self.n, self.k), config.majors.b_is_mn, 8, generator)
        else:
            (a, b), recipes = operands(config, *given), (config.sfa, config.sfb)
        at = torch.randint(0, self.n, (self.m,), generator=generator, dtype=torch.int32)
        at[1:4] = torch.tensor([-1, self.n, self.n - 1], dtype=torch.int32)[: self.m - 1]
        sums = torch.full((self.m, ceil_div(self.n, BLOCK) + 3), torch.nan, dtype=torch.float32)
        softmax = {"tokens": at + FIRST, "chosen": sums[:, :1].clone(), "first": FIRST, "scale": SCALE}
        return block_sums_problem(a, b, sums[:, :-3], recipes, **softmax)

    def results(self, kernel: HostKernel | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the kernel, and return the sums and the chosen logits."""
        problem, softmax = self.problem(), self.problem().softmax
        assert softmax is not None
        p, tensors = launch.prepared(problem, self.config), {"chosen": softmax["chosen"]}
        stage = stage_of(self.config, p, {"sfb": 4}, more=tensors, read={"tokens": softmax["tokens"]}, **self.how)
        with stage.launches({self.kernel: kernel}):
            placed = stage.placed(
                p._replace(softmax={**softmax, "tokens": stage.at["tokens"], "chosen": stage.at["chosen"]})
            )
            launch.start(placed, self.config, stage.num_sms)
        found = stage.result().buffers
        return found["d"], found["chosen"]

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare sums and chosen logits with exact values; allow what rounding of logits and powers explains."""
        (sums, chosen), p = self.results(kernel), self.problem()
        if p.of_b is None:
            logits, allowed = exact_and_allowed(p, torch.float32, 1, units_of_step(self.how))
        else:
            logits = reference.product(p, p.a, p.sfa, p.b, p.sfb)
            allowed = allowed_difference(p, logits, partial_sums(self.how))
        assert p.softmax is not None
        at = p.softmax["tokens"].long()[:, None] - FIRST
        is_here = (at >= 0) & (at < self.n)
        exact, allowed = logits.double() * SCALE, allowed * SCALE
        picked, off = (x.gather(1, at.clamp(0, self.n - 1)) for x in (exact, allowed))
        largest_part("chosen", chosen, picked.masked_fill(~is_here, torch.nan), within_units(picked.float(), off))
        blocks, of_blocks = (
            F.pad(x, (0, -self.n % BLOCK), value=value).view(self.m, -1, BLOCK)
            for x, value in ((exact, -torch.inf), (allowed, 0.0))
        )
        right = torch.logsumexp(blocks, 2)
        return largest_part("sums", sums, right, within_units(right.float(), of_blocks.amax(2) + FEW_UNITS))


class Bf16BlockSumsTrial(BlockSumsTrial):
    """The same trial for products by `bf16_gemm`."""

    kernel = BF16_GEMM
