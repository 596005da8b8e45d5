"""The kernel of gemm/k_group_maps.cuh, which makes the tensor maps of groups along k on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.kernel import Config, Kernel
from ..core.params import Field, Kind, Params

MAX_INLINE_KS = 896
"""Depths from the host that it takes among its parameters."""
GROUP_BYTES, COUNTER_BYTES = 320, 4
"""Sizes of what it writes: a `KGroup` for each group, and behind them the counter of tiles."""
PARAMS = Params(
    "MapParams",
    Field("map_a", Kind.MAP),
    Field("map_b", Kind.MAP),
    Field("a", Kind.POINTER),
    Field("b", Kind.POINTER),
    Field("k_groups", Kind.POINTER),
    Field("ks", Kind.POINTER),
    Field("m", Kind.UINT32),
    Field("n", Kind.UINT32),
    Field("count", Kind.UINT32),
    Field("sum_k", Kind.UINT32),
    Field("num_k_blocks", Kind.UINT32),
    Field("inline_ks", Kind.UINT32, MAX_INLINE_KS),
)


@dataclass(frozen=True)
class MapsConfig(Config):
    """The one configuration."""

    name: str = "maps"
    num_threads: int = 32
    """Threads of its CTAs, one for each group."""

    def constants(self) -> dict[str, int | bool]:
        """There are none: the source includes no `config.cuh`."""
        return {}


CONFIG = MapsConfig()
KERNEL: Kernel[MapsConfig] = Kernel("k_group_maps", PARAMS, lambda: [CONFIG])


def room_bytes(num_groups: int) -> int:
    """Size of what it writes for the kernel that multiplies."""
    return num_groups * GROUP_BYTES + COUNTER_BYTES
