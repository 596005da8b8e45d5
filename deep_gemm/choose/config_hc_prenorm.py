"""The configuration of the `hc_prenorm` kernel: tiles of tall matrices times few columns, and who shares out k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..problem.hyper_connections import BLOCK_K, COLUMNS
from ..problem.layout import align, ceil_div
from .config import SHARED_BYTES_LIMIT, WARPGROUP_THREADS

BLOCK_M = (64, 128)
MAX_CLUSTER = 16
"""More than 8 CTAs are not portable: a GPU says whether it runs such a cluster."""
MAX_STAGES = 16
ROW_BYTES = 128
"""64 elements of A; half of 64 elements of B."""
CHUNK_BYTES = 512
"""Of what CTAs exchange: four sums of each lane of a warp."""


@dataclass(frozen=True)
class HcConfig:
    """One configuration."""

    block_m: int
    block_n: int
    """Rows of B of a tile: all of them, or 8 if rows of A are so few that B is most of the work."""
    cluster: int = 1
    """CTAs that share out the k-blocks of a tile."""
    splitter_groups: int = 2
    """Warpgroups that split B, each a k-block at a time."""
    max_stages: int = MAX_STAGES

    @property
    def name(self) -> str:
        """Short, for people; such as "128x24/k2"."""
        return f"{self.block_m}x{self.block_n}/k{self.cluster}"

    @property
    def num_math_warps(self) -> int:
        """A warpgroup for each 64 rows."""
        return self.block_m // 16

    @property
    def num_threads(self) -> int:
        """Threads of a CTA: math warps, splitters, and the producer's warp."""
        return self.num_math_warps * 32 + self.splitter_groups * WARPGROUP_THREADS + 32

    @property
    def slot_bytes(self) -> int:
        """A k-block of A and one of B."""
        return (self.block_m + 2 * self.block_n) * ROW_BYTES

    @property
    def exchange_bytes(self) -> int:
        """What CTAs of the cluster send to this one."""
        if self.cluster == 1:
            return 16
        chunks = (self.block_n // 8 + 1) * self.num_math_warps
        return self.cluster * ceil_div(chunks, self.cluster) * CHUNK_BYTES

    @property
    def num_stages(self) -> int:
        """K-blocks in shared memory: as many as fit, the same number for each group of splitters."""
        left = SHARED_BYTES_LIMIT // 1024 * 1024 - align(self.exchange_bytes, 128) - 16
        fitting = min(left // (self.slot_bytes + 24), self.max_stages)
        return fitting // self.splitter_groups * self.splitter_groups

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/hc_prenorm.cuh, which asserts that it is the same."""
        return align(self.num_stages * (self.slot_bytes + 24) + self.exchange_bytes + 16, 1024)

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        yield self.block_m in BLOCK_M, f"tiles of {BLOCK_M} rows"
        yield self.block_n in COLUMNS, f"tiles of {COLUMNS} columns"
        yield 1 <= self.cluster <= MAX_CLUSTER, f"clusters of 1 to {MAX_CLUSTER} CTAs"
        yield 1 <= self.splitter_groups <= 4, "1 to 4 groups of splitters"
        yield self.num_threads <= 1024, f"at most 1024 threads, not {self.num_threads}"
        yield self.num_stages >= 2, "at least 2 stages"
        yield self.shared_bytes <= SHARED_BYTES_LIMIT, f"{self.shared_bytes} of {SHARED_BYTES_LIMIT} bytes shared"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        numbers = {
            "kBlockM": self.block_m,
            "kBlockN": self.block_n,
            "kClusterK": self.cluster,
            "kSplitterGroups": self.splitter_groups,
            "kNumStages": self.num_stages,
            "kMulticastCtas": 1,
            "kNumMathWarps": self.num_math_warps,
            "kNumThreads": self.num_threads,
            "kSharedBytes": self.shared_bytes,
        }
        lines = [f"constexpr uint32_t {name} = {value};" for name, value in numbers.items()]
        return "\n".join(["#pragma once", '#include "types.cuh"', *lines, ""])


def units(config: HcConfig, m: int, n: int, splits: int) -> int:
    """Count units of work: a tile of D, of one split."""
    return ceil_div(m, config.block_m) * (n // config.block_n) * splits


def grid(config: HcConfig, m: int, n: int, splits: int, num_sms: int) -> int:
    """A cluster for each unit, or as many as SMs have room for: these take several units each."""
    return min(units(config, m, n, splits), max(num_sms // config.cluster, 1)) * config.cluster


@lru_cache(4096)
def hc_config(m: int, n: int, k: int, splits: int, num_sms: int, max_cluster: int = MAX_CLUSTER) -> HcConfig:
    """Choose the configuration for a problem."""
    few = m <= 64
    block_m = 64 if m <= 1024 else 128
    block_n = 8 if few else n
    tiles = ceil_div(m, block_m) * (n // block_n) * splits
    blocks = max(ceil_div(k // BLOCK_K, splits), 1)
    cluster = max(min(num_sms // tiles, max_cluster, blocks), 1)
    return HcConfig(block_m, block_n, cluster)
