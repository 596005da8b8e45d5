"""The kernel of across/meet_ranks.cuh: how it is compiled, and launched for a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.kernel import OrdinaryKernel
from ..core.meeting import FIELDS, STORAGE_BYTES, Node, Way
from ..core.params import Params

PARAMS = Params("MeetParams", *FIELDS)
"""`MeetParams` of across/meet_ranks.cuh."""


@dataclass(frozen=True)
class MeetConfig:
    """The configuration: there is one. One warp sets the flags, and waits."""

    num_threads: ClassVar[int] = 32
    shared_bytes: ClassVar[int] = STORAGE_BYTES
    ctas_per_sm: ClassVar[int] = 1
    name: ClassVar[str] = "one warp"

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so: it can."""
        return None

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        constants = {"kNumThreads": self.num_threads, "kSharedBytes": self.shared_bytes}
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in constants.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


CONFIG = MeetConfig()
KERNEL: Any = OrdinaryKernel("meet_ranks", PARAMS)
SOURCE, NAME, headers, code_plan = KERNEL.source, KERNEL.name, KERNEL.headers, KERNEL.code_plan


def run(node: Node, device: int) -> None:
    """Wait until the results of all ranks have come."""
    KERNEL.run(CONFIG, params_of(node), 1, device)


def params_of(node: Node) -> bytes:
    """Give the kernel's parameters."""
    return PARAMS.pack(node.meeting(Way.BACK))
