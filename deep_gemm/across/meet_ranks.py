"""The kernel of across/meet_ranks.cuh: its one configuration, and its launch on a node's GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.kernel import Config, Kernel
from ..core.meeting import MAX_RANKS, STORAGE_BYTES, Node, Way


@dataclass(frozen=True)
class MeetConfig(Config):
    """The only configuration. One warp sets the flags, and waits for the other ranks' flags."""

    num_threads: int = 32
    shared_bytes: int = STORAGE_BYTES
    name: str = "one warp"
    taken = "num_threads", "shared_bytes"


CONFIG = MeetConfig()
KERNEL: Kernel[MeetConfig] = Kernel("meet_ranks", "MeetParams", lambda: [CONFIG], lengths={"kMaxRanks": MAX_RANKS})


def run(node: Node, device: int) -> None:
    """Wait until this rank has received the results of all ranks."""
    KERNEL.run(CONFIG, node.meeting(Way.BACK), 1, device)
