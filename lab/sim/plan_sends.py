"""The `plan_sends` kernel in the simulator, with the source and parameters of a GPU's launch."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.across import plan_sends
from deep_gemm.across.owners import count_routes, owners_of_routes, owners_of_tokens
from deep_gemm.across.plan_sends import NUM_FACTS, PlanSendsConfig
from deep_gemm.moe.routing import expert_rows

from .launcher import How, Stage
from .library import HostKernel
from .trial import Trial, same

POISON = -0x5A5A5A5A
FACTS = (1, 2**62, -1, 5, -(2**40), 7, 3)


def check(
    kernel: HostKernel | None,
    config: PlanSendsConfig,
    topk_ids: Tensor,
    experts_here: int,
    ranks: int,
    **how: Unpack[How],
) -> None:
    """Run the plan on simulated SMs, and compare `row_of` and `told` with torch's results."""
    tokens, topk = topk_ids.shape
    row_of = torch.full((max(tokens, 1), topk), POISON, dtype=torch.int32)  # a buffer cannot be empty
    told = torch.full((NUM_FACTS + 2 * ranks,), POISON, dtype=torch.int64)
    given = topk_ids if tokens else row_of.to(topk_ids.dtype)
    stage = Stage(config, {"topk_ids": given}, {"row_of": row_of, "told": told}, **how)
    stage.run(
        plan_sends.KERNEL,
        kernel,
        lambda at: plan_sends.values_of(at["topk_ids"][:tokens], FACTS, at["row_of"], at["told"], experts_here, ranks),
        plan_sends.grid(config, tokens),
    )
    owners = owners_of_routes(topk_ids, experts_here, ranks)
    rows = expert_rows(owners_of_tokens(owners, ranks), ranks)
    right = torch.tensor([*FACTS, *rows.counts.tolist(), *count_routes(owners, ranks).tolist()], dtype=torch.int64)
    same("row_of", row_of[:tokens], rows.row_of)
    same("told", told, right)


@dataclass(frozen=True)
class PlanTrial(Trial):
    """Routes of random tokens; some have no expert."""

    kernel = plan_sends.KERNEL
    config: PlanSendsConfig
    tokens: int
    topk: int
    experts_here: int
    ranks: int
    seed: int = 0
    schedule: str | None = None

    @classmethod
    def drawn(cls, config: PlanSendsConfig, seed: int) -> PlanTrial:
        """Draw the sizes of a group."""
        draw = random.Random(seed)
        return cls(config, draw.randint(1, 400), draw.randint(1, 9), draw.randint(1, 8), draw.randint(1, 64), seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare `row_of` and `told`, bit for bit."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.tokens, self.topk)
        ids = torch.randint(-1, self.experts_here * self.ranks + 1, shape, generator=generator)
        ids[-1, 0] = self.experts_here << 6  # an id far past the last expert
        if self.config.id_bytes == 8:  # only the lower half of the id is an expert's
            ids[0, 0] = 1 << 32
        given = ids.to(torch.int64 if self.config.id_bytes == 8 else torch.int32)
        check(kernel, self.config, given, self.experts_here, self.ranks, **self.how)
        return 0.0
