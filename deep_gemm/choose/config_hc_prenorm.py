"""The configuration of the `hc_prenorm` kernel: tiles of tall matrices times few columns, and who shares out k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..problem.hyper_connections import BLOCK_K, COLUMNS
from ..problem.layout import align, ceil_div
from .config import SHARED_BYTES_LIMIT, WARPGROUP_THREADS

BLOCK_M = (64, 128)
MAX_CLUSTER = 16
"""More than 8 CTAs are not portable: a GPU says whether it runs such a cluster."""
MAX_STAGES = 16
ROW_BYTES = 128
"""64 elements of A; half of 64 elements of B."""
AT_ONCE = {1: 132, 2: 66, 4: 30, 8: 15}
"""How many clusters of a size run at a time on an H200: those that are chosen from."""
PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 20, 22, 24, 28, 30, 33)
INVARIANT_CLUSTER = 4
BLOCK_US = {64: 0.30, 128: 0.41}
"""Microseconds that a CTA takes for a k-block of a tile of so many rows."""
UNIT_US, EXCHANGE_US, PARTS_US, CHUNK_US = 0.3, 0.6, 1.0, 0.0064
"""Microseconds between units, for the sums of a cluster, for those of several clusters, and for each chunk of these."""
BYTES_PER_US = 4.2e6
CHUNK_BYTES = 512
"""Of what CTAs exchange: four sums of each lane of a warp."""


@dataclass(frozen=True)
class HcConfig:
    """One configuration."""

    block_m: int
    block_n: int
    """Rows of B of a tile: all of them, or a part."""
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
    def chunks(self) -> int:
        """Quads of sums of all math warps: those of 8 columns, and those of squares."""
        return (self.block_n // 8 + 1) * self.num_math_warps

    @property
    def exchange_bytes(self) -> int:
        """What CTAs of the cluster send to this one."""
        if self.cluster == 1:
            return 16
        return self.cluster * ceil_div(self.chunks, self.cluster) * CHUNK_BYTES

    @property
    def num_stages(self) -> int:
        """K-blocks in shared memory: as many as fit, the same number for each group of splitters."""
        left = SHARED_BYTES_LIMIT // 1024 * 1024 - align(self.exchange_bytes, 128) - 24
        fitting = min(left // (self.slot_bytes + 24), self.max_stages)
        return fitting // self.splitter_groups * self.splitter_groups

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/hc_prenorm.cuh, which asserts that it is the same."""
        return align(self.num_stages * (self.slot_bytes + 24) + self.exchange_bytes + 20, 1024)

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


class HcChoice(NamedTuple):
    """How a problem is shared out."""

    config: HcConfig
    parts: int = 1
    """Clusters that share a tile. If they are several, they meet in memory."""

    def tiles(self, m: int, n: int, splits: int) -> int:
        """Count tiles of D, those of each split."""
        return ceil_div(m, self.config.block_m) * (n // self.config.block_n) * splits

    def units(self, m: int, n: int, splits: int) -> int:
        """Count units of work, each a cluster's."""
        return self.tiles(m, n, splits) * self.parts

    def grid(self, m: int, n: int, splits: int, num_sms: int) -> int:
        """A cluster for each unit, or as many as SMs have room for: these take several units each."""
        cluster = self.config.cluster
        return min(self.units(m, n, splits), max(num_sms // cluster, 1)) * cluster

    def workspace_bytes(self, m: int, n: int, splits: int) -> tuple[int, int]:
        """Count bytes of partial sums, and of counters, which must be zeros."""
        if self.parts == 1:
            return 0, 0
        return (
            self.units(m, n, splits) * self.config.chunks * CHUNK_BYTES,
            self.tiles(m, n, splits) * self.config.cluster * 4,
        )


def bytes_of(m: int, n: int, k: int, splits: int) -> int:
    """Bytes that must move."""
    return m * k * 2 + n * k * 4 + splits * m * (n + 1) * 4


def estimated_us(choice: HcChoice, m: int, n: int, k: int, splits: int, num_sms: int) -> float:
    """Estimate microseconds: what the longest-working CTA multiplies, or what memory takes, and what is fixed."""
    config, parts = choice
    at_once = max(min(num_sms // config.cluster, AT_ONCE[config.cluster]), 1)
    rounds = ceil_div(choice.units(m, n, splits), at_once)
    blocks = ceil_div(ceil_div(k // BLOCK_K, splits), config.cluster * parts)
    streaming_us = max(rounds * blocks * BLOCK_US[config.block_m], bytes_of(m, n, k, splits) / BYTES_PER_US)
    chunks_to_add = ceil_div(config.chunks, config.cluster) * parts * min(m / config.block_m, 1)
    shared_us = EXCHANGE_US * (config.cluster > 1) + (PARTS_US + CHUNK_US * chunks_to_add) * (parts > 1)
    return streaming_us + rounds * UNIT_US + shared_us


@lru_cache(4096)
def hc_choice(m: int, n: int, k: int, splits: int, num_sms: int, batch_invariant: bool = False) -> HcChoice:
    """Choose how a problem is shared out: what is estimated to take the least time.

    A row's bits depend on how many CTAs share out k, and on nothing else: with `batch_invariant` always as many do.
    """
    choices = (
        HcChoice(config, parts)
        for config in _candidates(n)
        if config.cluster <= num_sms
        for parts in PARTS
        if parts == 1 or HcChoice(config, parts).units(m, n, splits) * config.cluster <= num_sms
    )
    if batch_invariant:
        choices = (HcChoice(config) for config in _candidates(n) if config.cluster == INVARIANT_CLUSTER)
    return min(choices, key=lambda choice: estimated_us(choice, m, n, k, splits, num_sms))


@lru_cache(len(COLUMNS))
def _candidates(n: int) -> tuple[HcConfig, ...]:
    return tuple(HcConfig(block_m, n, cluster) for block_m in BLOCK_M for cluster in AT_ONCE)


def reachable_hc() -> list[HcConfig]:
    """Every configuration that `hc_choice` can give."""
    return [config for n in COLUMNS for config in _candidates(n)]
