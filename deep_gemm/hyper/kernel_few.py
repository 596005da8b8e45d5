"""The kernel of hc_prenorm_few.cuh: few rows times few columns, by warps that divide k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..core.check.layout import align, ceil_div
from ..core.gpu import H200
from ..core.kernel import Config, Kernel, constants_of
from .check import BLOCK_K, COLUMNS, HcProblem
from .kernel import CHUNK_BYTES, MAX_CLUSTER, values_of_both

TILE_ROWS = 16
"""Rows of a tile: the rows of one product of mma.sync."""
STEP = 32
"""Values of k that a warp multiplies at a time."""
AHEAD = {8: 4, 16: 3, 24: 3, 32: 2}
"""Steps whose loads a warp has in flight, by columns: registers allow no more."""
FEW_US, CLUSTER_US = 2.36, 1.85
"""Microseconds that the kernel takes to begin and end, and for the sums of a cluster."""
STEP_US, COLUMN_US = 0.337, 0.0194
"""Microseconds that a CTA takes for a step of each of its warps: a constant, and more for each column."""
ROUND_US = 2.84
"""Microseconds from the end of a CTA to the first loads of the next CTA on its SM."""
SHARED_US = 0.58
"""Microseconds added if each SM has one more CTA."""
CTAS_PER_SM = {8: 2, 16: 1, 24: 1, 32: 1}
"""CTAs that fit in an SM's registers, by the columns of a tile."""
CLUSTERS_AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}
"""Clusters that run at a time on an H200, by cluster size, if each SM has one CTA."""


@dataclass(frozen=True)
class HcFewConfig(Config):
    """One configuration of `tf32_hc_prenorm_gemm_few`."""

    block_n: int
    """Columns of a tile: all columns, or 8 if tiles are few."""
    cluster_size: int = 1
    """CTAs that divide k."""
    warps: int = 8
    """Warps of a CTA, which take steps in turn."""
    ahead: int = 3
    """Steps that a warp has in registers."""
    block_m = TILE_ROWS
    """Rows of a tile."""

    @property
    def name(self) -> str:
        """Short name for people, such as "16x8/k16/w8 4 ahead"."""
        return f"{TILE_ROWS}x{self.block_n}/k{self.cluster_size}/w{self.warps} {self.ahead} ahead"

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * 32

    @property
    def chunks(self) -> int:
        """Chunks of a tile's sums: four sums of each lane of a warp, for 8 columns or for squares."""
        return self.block_n // 8 + 1

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in hyper/hc_prenorm_few.cuh, which asserts that it is the same, in whole 16 bytes."""
        ctas = self.cluster_size
        sent = ctas * ceil_div(self.chunks, ctas) * CHUNK_BYTES if ctas > 1 else 16
        return align(self.warps * self.chunks * CHUNK_BYTES + sent + 8, 16)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.block_n in COLUMNS, f"tiles of {COLUMNS} columns"
        yield 1 <= self.cluster_size <= MAX_CLUSTER, f"clusters of 1 to {MAX_CLUSTER} CTAs"
        yield 1 <= self.warps <= 16, "1 to 16 warps"
        yield 1 <= self.ahead <= 8, "1 to 8 steps ahead"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers that the source needs."""
        same = constants_of(self, "block_n", "warps", "ahead", "shared_bytes")
        return {**same, "kClusterK": self.cluster_size, "kNumMathWarps": 1}


def tiles(config: HcFewConfig, m: int, n: int, splits: int) -> int:
    """Count the tiles of D in all splits: each has a cluster."""
    return ceil_div(m, TILE_ROWS) * (n // config.block_n) * splits


def grid(config: HcFewConfig, m: int, n: int, splits: int, num_sms: int) -> int:
    """Count the CTAs: a cluster for each tile. `num_sms` decides only whether this kernel is chosen."""
    return tiles(config, m, n, splits) * config.cluster_size


def values_of(config: HcFewConfig, p: HcProblem) -> dict[str, Any]:
    """Return the kernel's parameters by member."""
    return {
        **values_of_both(p, config.block_n),
        "a": p.a,
        "b": p.b,
        "a_pitch": p.a.stride(0) * p.a.element_size(),
        "b_pitch": p.b.stride(0) * p.b.element_size(),
    }


def few_us(config: HcFewConfig, m: int, n: int, k: int, splits: int, num_sms: int) -> float:
    """Estimate microseconds of the kernel for few rows."""
    ctas_per_sm = CTAS_PER_SM[config.block_n]
    at_once = max(CLUSTERS_AT_ONCE[config.cluster_size] * num_sms // H200.num_sms, 1) * ctas_per_sm
    clusters = tiles(config, m, n, splits)
    rounds = ceil_div(clusters, at_once)
    more = max(min(clusters, at_once) * config.cluster_size / num_sms - 1, 0)  # CTAs that share an SM
    blocks = ceil_div(k // BLOCK_K, splits)
    steps = ceil_div(blocks * BLOCK_K // STEP, config.cluster_size * config.warps)
    step_us = STEP_US + COLUMN_US * config.block_n
    begin_us = FEW_US + SHARED_US * more + (CLUSTER_US if config.cluster_size > 1 else 0)
    return begin_us + rounds * steps * step_us + (rounds - 1) * ROUND_US


@lru_cache(len(COLUMNS))
def few_configs(n: int) -> tuple[HcFewConfig, ...]:
    """Return the candidates for `n` columns: a tile has all columns, or 8."""
    columns = dict.fromkeys((n, COLUMNS[0]))
    return tuple(
        HcFewConfig(block_n, cluster, ahead=AHEAD[block_n]) for block_n in columns for cluster in CLUSTERS_AT_ONCE
    )


def reachable_few() -> list[HcFewConfig]:
    """List every configuration for few rows that `select_hc` can return."""
    return list(dict.fromkeys(config for n in COLUMNS for config in few_configs(n)))


KERNEL: Kernel[HcFewConfig] = Kernel("hc_prenorm_few", "HcFewParams", reachable_few, name="tf32_hc_prenorm_gemm_few")
