"""The kernel of gemm/k_group_maps.cuh, which makes the tensor maps of groups along k on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.kernel import Config, Kernel

MAX_INLINE_KS = 896
"""Depths from the host that it takes among its parameters."""
GROUP_BYTES, COUNTER_BYTES = 320, 4
"""Sizes of what it writes: a `KGroup` for each group, and behind them the counter of tiles."""


@dataclass(frozen=True)
class MapsConfig(Config):
    """The one configuration."""

    name: str = "maps"
    num_threads: int = 32
    """Threads of its CTAs, one for each group. The source takes no constants: it includes no `config.cuh`."""


CONFIG = MapsConfig()
KERNEL: Kernel[MapsConfig] = Kernel(
    "k_group_maps", "MapParams", lambda: [CONFIG], lengths={"kMaxInlineKs": MAX_INLINE_KS}
)


def room_bytes(num_groups: int) -> int:
    """Size of what it writes for the kernel that multiplies."""
    return num_groups * GROUP_BYTES + COUNTER_BYTES
