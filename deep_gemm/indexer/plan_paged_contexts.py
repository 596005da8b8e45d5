"""The kernel of indexer/plan_paged_contexts.cuh: how it is compiled, and launched for the contexts of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..core.kernel import OrdinaryKernel
from ..core.params import Field, Kind, Params
from .paged_check import SEGMENT_KEYS

PARAMS = Params(
    "PlanParams",
    Field("contexts", Kind.POINTER),
    Field("schedule", Kind.POINTER),
    Field("sequences", Kind.UINT32),
    Field("next_n", Kind.UINT32),
    Field("shares", Kind.UINT32),
)
"""`PlanParams` of indexer/plan_paged_contexts.cuh."""


@dataclass(frozen=True)
class PlanConfig:
    """The one configuration."""

    num_threads: int = 512
    ctas_per_sm: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.num_threads} threads"

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in indexer/plan_paged_contexts.cuh, which asserts that it is the same."""
        return (self.num_threads + self.num_threads // 32) * 4

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return None if self.num_threads in (128, 256, 512, 1024) else "needs 128, 256, 512 or 1024 threads"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {
            "kNumThreads": self.num_threads,
            "kSharedBytes": self.shared_bytes,
            "kSegmentKeys": SEGMENT_KEYS,
        }
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


KERNEL: Any = OrdinaryKernel("plan_paged_contexts", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan
CONFIG = PlanConfig()


def run(contexts: Tensor, schedule: Tensor) -> None:
    """Write the schedule on the GPU that the contexts are on."""
    KERNEL.run(CONFIG, params_of(contexts, schedule), 1, contexts.get_device())


def params_of(contexts: Tensor, schedule: Tensor) -> bytes:
    """Give the kernel's parameters."""
    return PARAMS.pack(
        {
            "contexts": contexts.data_ptr(),
            "schedule": schedule.data_ptr(),
            "sequences": contexts.shape[0],
            "next_n": 1 if contexts.dim() == 1 else contexts.shape[1],
            "shares": schedule.shape[0] - 1,
        }
    )
