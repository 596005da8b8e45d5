"""The kernel of across/plan_sends.cuh: its configurations, and its launch for the tokens of a rank."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from ..core.check.layout import ceil_div
from ..core.kernel import Config, Kernel

NUM_FACTS = 7
"""Numbers that a rank sends to every rank, besides its counts of rows and routes."""
MAX_RANKS = 64


@dataclass(frozen=True)
class PlanSendsConfig(Config):
    """One configuration. A CTA gives rows to one token for each of its threads."""

    id_bytes: int
    num_threads: int = 1024
    num_facts = NUM_FACTS
    max_ranks = MAX_RANKS
    taken = "id_bytes", "num_threads", "shared_bytes", "num_facts", "max_ranks"

    @property
    def name(self) -> str:
        """Return a short name for people, such as "int64"."""
        return f"int{self.id_bytes * 8}"

    @property
    def shared_bytes(self) -> int:
        """Return the size of `SharedStorage` in across/plan_sends.cuh, which asserts the same size."""
        return (3 + self.num_threads // 32) * MAX_RANKS * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.id_bytes in (4, 8), "ids of 4 or 8 bytes"
        yield self.num_threads % 32 == 0 and self.num_threads >= MAX_RANKS, "a thread for each rank"


config_of = cache(PlanSendsConfig)
"""Returns the configuration for ids of this size."""
KERNEL: Kernel[PlanSendsConfig] = Kernel(
    "plan_sends",
    "PlanSendsParams",
    lambda: [config_of(id_bytes) for id_bytes in (4, 8)],
    lengths={"kNumFacts": NUM_FACTS},
)


def run(topk_ids: Tensor, facts: Sequence[int], row_of: Tensor, told: Tensor, experts_here: int, ranks: int) -> None:
    """Give tokens their rows, and write the numbers for all ranks into `told`, on the GPU of the ids.

    `topk_ids`, int32 or int64 `[tokens, topk]`, and `row_of`, int32 of the same shape, are contiguous; `told` is int64
    `[NUM_FACTS + 2 ranks]`.
    """
    config = config_of(topk_ids.element_size())
    values = values_of(topk_ids, facts, row_of, told, experts_here, ranks)
    KERNEL.run(config, values, grid(config, topk_ids.shape[0]), topk_ids.get_device())


def grid(config: PlanSendsConfig, tokens: int) -> int:
    """Count the CTAs: one for each `num_threads` tokens. If there are no tokens, one CTA writes counts of 0."""
    return max(ceil_div(tokens, config.num_threads), 1)


def values_of(
    topk_ids: Tensor, facts: Sequence[int], row_of: Tensor, told: Tensor, experts_here: int, ranks: int
) -> dict[str, Any]:
    """Return the members of the kernel's parameters."""
    return {
        "facts": struct.pack(f"<{NUM_FACTS}q", *facts),  # some are negative
        "topk_ids": topk_ids,
        "row_of": row_of,
        "told": told,
        "tokens": topk_ids.shape[0],
        "topk": topk_ids.shape[1],
        "experts_here": experts_here,
        "ranks": ranks,
    }
