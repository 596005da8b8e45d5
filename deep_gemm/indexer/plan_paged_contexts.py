"""The kernel of indexer/plan_paged_contexts.cuh: its configuration, and its launch for the contexts of sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.kernel import Config, Kernel
from .check import SEGMENT_KEYS


@dataclass(frozen=True)
class PlanConfig(Config):
    """The only configuration of `plan_paged_contexts`."""

    num_threads: int = 512
    segment_keys = SEGMENT_KEYS
    taken = "num_threads", "shared_bytes", "segment_keys"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in indexer/plan_paged_contexts.cuh, which asserts that it is the same."""
        return (self.num_threads + self.num_threads // 32) * 4

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.num_threads in (128, 256, 512, 1024), "128, 256, 512 or 1024 threads"


CONFIG = PlanConfig()
KERNEL: Kernel[PlanConfig] = Kernel("plan_paged_contexts", "PlanParams", lambda: [CONFIG])


def run(contexts: Tensor, schedule: Tensor) -> None:
    """Write the schedule on the GPU of the contexts."""
    KERNEL.run(CONFIG, values_of(contexts, schedule), 1, contexts.get_device())


def values_of(contexts: Tensor, schedule: Tensor) -> dict[str, Any]:
    """Return the kernel's parameters by member."""
    return {
        "contexts": contexts,
        "schedule": schedule,
        "sequences": contexts.shape[0],
        "next_n": 1 if contexts.dim() == 1 else contexts.shape[1],
        "shares": schedule.shape[0] - 1,
    }
