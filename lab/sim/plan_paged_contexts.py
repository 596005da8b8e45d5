"""The kernel that plans shares of paged contexts in the simulator, with the source and parameters that a GPU gets."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Unpack

from deep_gemm.indexer import plan_paged_contexts
from deep_gemm.indexer.plan_paged_contexts import CONFIG, PlanConfig
from deep_gemm.indexer.reference import schedule

from .launcher import How, Stage
from .library import HostKernel
from .trial import Trial, same

POISON = -0x5A5A5A5A


def check(kernel: HostKernel | None, contexts: Tensor, shares: int, **how: Unpack[How]) -> Tensor:
    """Make a schedule on a simulated SM, compare it with the reference's, and give it."""
    right, got = torch.empty(shares + 1, 2, dtype=torch.int32), torch.full((shares + 1, 2), POISON, dtype=torch.int32)
    schedule(contexts, right)
    given = contexts if len(contexts) else contexts.new_zeros(1, *contexts.shape[1:])  # no buffer is empty
    stage = Stage(CONFIG, {"contexts": given}, {"out": got}, {"out": 8}, **how)
    params_of = plan_paged_contexts.params_of
    stage.run(
        plan_paged_contexts.KERNEL, kernel, lambda _, at: params_of(at["contexts"][: len(contexts)], at["out"]), 1
    )
    same("schedule", got, right)
    return got


@dataclass(frozen=True)
class PlanTrial(Trial):
    """Contexts of sequences, and shares to plan for."""

    kernel = plan_paged_contexts.KERNEL
    sequences: int
    next_n: int
    shares: int
    most: int = 2000
    seed: int = 0
    schedule: str | None = None
    config: PlanConfig = CONFIG

    @classmethod
    def drawn(cls, config: PlanConfig, seed: int) -> PlanTrial:
        """Draw sequences and shares."""
        draw = random.Random(seed)
        return cls(draw.randint(1, 900), draw.randint(1, 4), draw.randint(1, 200), draw.choice((0, 90, 4000)), seed)

    def check(self, kernel: HostKernel | None = None) -> float:
        """Compare the schedule, to the bit."""
        g = torch.Generator().manual_seed(self.seed)
        lengths = torch.randint(-300, self.most, (self.sequences, self.next_n), generator=g, dtype=torch.int32)
        check(kernel, lengths, self.shares, **self.how)
        return 0.0
