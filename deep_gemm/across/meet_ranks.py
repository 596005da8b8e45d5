"""The kernel of across/meet_ranks.cuh: how it is compiled, and launched for a node."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.kernel import Config, Kernel
from ..core.meeting import MAX_RANKS, STORAGE_BYTES, Node, Way


@dataclass(frozen=True)
class MeetConfig(Config):
    """The configuration: there is one. One warp sets the flags, and waits."""

    num_threads: int = 32
    shared_bytes: int = STORAGE_BYTES
    ctas_per_sm: int = 1
    name: str = "one warp"
    taken = "num_threads", "shared_bytes"


CONFIG = MeetConfig()
KERNEL: Kernel[MeetConfig] = Kernel("meet_ranks", "MeetParams", lambda: [CONFIG], lengths={"kMaxRanks": MAX_RANKS})


def run(node: Node, device: int) -> None:
    """Wait until the results of all ranks have come."""
    KERNEL.run(CONFIG, node.meeting(Way.BACK), 1, device)
