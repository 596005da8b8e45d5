"""The kernel of hc_prenorm.cuh: tall matrices times few columns through a ring; CTAs and teams divide k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..core.check.layout import align, ceil_div
from ..core.gpu import SHARED_BYTES_LIMIT
from ..core.jit.tensor_map import ElementType
from ..core.kernel import CodePlan, Config, Kernel, constants_of
from ..core.shadow import Mapped
from ..core.wgmma_header import wgmma_bf16_header
from ..gemm.maps import matrix_map
from .check import BLOCK_K, COLUMNS, HcProblem

BLOCK_M = (64, 128)
MAX_CLUSTER = 16
"""Clusters of more than 8 CTAs are not portable: the GPU's driver says whether one can run."""
MAX_STAGES = 16
MAX_TEAMS = 8
ROW_BYTES = 128
"""Bytes of 64 elements of A, or of half as many elements of B."""
AT_ONCE = {1: 132, 2: 66, 3: 39, 4: 30, 6: 16, 8: 15, 16: 7}
"""Clusters that run at a time on an H200, by cluster size. Only sizes with a known number are candidates."""
INVARIANT_CLUSTER, INVARIANT_TEAMS = 4, 2
TEAMS = {64: 4, 128: 2}
"""Teams, by the rows of a tile: 16 warps in all."""
BLOCK_US = {64: 0.215, 128: 0.4}
"""Microseconds that a CTA takes for a k-block, by the rows of a tile."""
UNIT_US, EXCHANGE_US, CTA_US = {64: 0.69, 128: 1.375}, 0.58, 0.145
"""Microseconds for a unit besides its k-blocks, for the sums of a cluster, and for each of its CTAs."""
BYTES_PER_US, REREAD = 4.2e6, 0.05
"""Bytes of A, B and D that memory moves in a microsecond; the cost of reading B from the L2, relative to DRAM."""
CHUNK_BYTES = 512
"""Bytes of a chunk that CTAs exchange: four sums of each lane of a warp."""
PRODUCT_K = 16
"""Elements along k of one BF16 WGMMA."""


@dataclass(frozen=True)
class HcConfig(Config):
    """One configuration of `tf32_hc_prenorm_gemm`."""

    block_m: int
    block_n: int
    """Rows of B in a tile: all rows, or 8 if A has few rows and B is most of the work."""
    cluster_size: int = 1
    """CTAs that divide the k-blocks of a tile."""
    teams: int = 2
    """Groups of warps that multiply whole k-blocks in turn."""
    max_stages: int = MAX_STAGES

    @property
    def name(self) -> str:
        """Short name for people, such as "128x24/k2/t2"."""
        return f"{self.block_m}x{self.block_n}/k{self.cluster_size}/t{self.teams}"

    @property
    def num_math_warps(self) -> int:
        """Warps of a team: a warpgroup for each 64 rows."""
        return self.block_m // 16

    @property
    def num_threads(self) -> int:
        """Threads of a CTA: all teams, and the producer's warp."""
        return self.num_math_warps * 32 * self.teams + 32

    @property
    def slot_bytes(self) -> int:
        """Bytes of a k-block of A and one of B."""
        return (self.block_m + 2 * self.block_n) * ROW_BYTES

    @property
    def exchange_bytes(self) -> int:
        """Bytes that the teams of all CTAs of the cluster send to this one."""
        chunks = (self.block_n // 8 + 1) * self.num_math_warps
        return self.cluster_size * self.teams * ceil_div(chunks, self.cluster_size) * CHUNK_BYTES

    @property
    def num_stages(self) -> int:
        """K-blocks that fit in shared memory, the same number for each team."""
        left = SHARED_BYTES_LIMIT // 1024 * 1024 - align(self.exchange_bytes, 128) - 16
        fitting = min(left // (self.slot_bytes + 16), self.max_stages)
        return fitting // self.teams * self.teams

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in hyper/hc_prenorm.cuh, which asserts that it is the same."""
        return align(self.num_stages * (self.slot_bytes + 16) + self.exchange_bytes + 16, 1024)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.block_m in BLOCK_M, f"tiles of {BLOCK_M} rows"
        yield self.block_n in COLUMNS, f"tiles of {COLUMNS} columns"
        yield 1 <= self.cluster_size <= MAX_CLUSTER, f"clusters of 1 to {MAX_CLUSTER} CTAs"
        yield 1 <= self.teams <= MAX_TEAMS, f"1 to {MAX_TEAMS} teams"
        yield self.num_threads <= 1024, f"at most 1024 threads, not {self.num_threads}"
        yield self.num_stages >= max(self.teams, 2), "at least a stage for each team"
        yield self.shared_bytes <= SHARED_BYTES_LIMIT, f"{self.shared_bytes} of {SHARED_BYTES_LIMIT} bytes shared"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers that the source needs."""
        names = "block_m", "block_n", "teams", "num_stages", "num_math_warps", "num_threads", "shared_bytes"
        return {**constants_of(self, *names), "kClusterK": self.cluster_size, "kMulticastCtas": 1}


def units(config: HcConfig, m: int, n: int, splits: int) -> int:
    """Count units of work: a unit is a tile of D in one split."""
    return ceil_div(m, config.block_m) * (n // config.block_n) * splits


def grid(config: HcConfig, m: int, n: int, splits: int, num_sms: int) -> int:
    """Count the CTAs: a cluster for each unit, but at most as many clusters as run at once."""
    return min(units(config, m, n, splits), max(num_sms // config.cluster_size, 1)) * config.cluster_size


def values_of(config: HcConfig, p: HcProblem) -> dict[str, Any]:
    """Return the kernel's parameters by member."""
    m, n, _, splits = p.sizes
    rows = min(config.block_m, m)
    return {
        **values_of_both(p, config.block_n),
        "map_a": Mapped(matrix_map(ElementType.BFLOAT16, p.a, (rows, BLOCK_K), 128), p.a),
        "map_b": Mapped(matrix_map(ElementType.FLOAT32, p.b, (config.block_n, BLOCK_K), 0), p.b),
        "units": units(config, m, n, splits),
        "slot_bytes": rows * BLOCK_K * 2 + config.block_n * BLOCK_K * 4,
    }


def values_of_both(p: HcProblem, block_n: int) -> dict[str, Any]:
    """Return the parameters that both kernels need: outputs and sizes, in tiles of `block_n` columns."""
    m, n, k, splits = p.sizes
    return {
        "d": p.d,
        "sqr_sum": p.sqr_sum,
        "d_pitch": p.d.stride(1),
        "d_stride": p.d.stride(0) if splits > 1 else 0,
        "m": m,
        "k_blocks": k // BLOCK_K,
        "splits": splits,
        "tiles_n": n // block_n,
    }


def code_plan(config: HcConfig) -> CodePlan:
    """Derive the parts that the kernel's machine code must have. Ordinary stores write the sums."""
    return CodePlan(
        roles=((config.num_math_warps * 32 * config.teams, None), (32, None)),
        shared_bytes=config.shared_bytes,
        hgmma=BLOCK_K // PRODUCT_K,
        tma_loads=2,
    )


def bytes_of(m: int, n: int, k: int, splits: int) -> int:
    """Count the bytes that memory must move."""
    return m * k * 2 + n * k * 4 + splits * m * (n + 1) * 4


def estimated_us(config: HcConfig, m: int, n: int, k: int, splits: int, num_sms: int) -> float:
    """Estimate microseconds: the longer of the busiest CTA's products and the memory traffic, plus overheads."""
    at_once = max(min(num_sms // config.cluster_size, AT_ONCE[config.cluster_size]), 1)
    rounds = ceil_div(units(config, m, n, splits), at_once)
    blocks = ceil_div(ceil_div(k // BLOCK_K, splits), config.cluster_size)
    moved = bytes_of(m, n, k, splits) + REREAD * ceil_div(m, config.block_m) * n * k * 4
    streaming_us = max(rounds * blocks * BLOCK_US[config.block_m], moved / BYTES_PER_US)
    exchange_us = EXCHANGE_US + CTA_US * config.cluster_size if config.cluster_size > 1 else 0
    return streaming_us + rounds * UNIT_US[config.block_m] + exchange_us


@lru_cache(4096)
def hc_config(
    m: int, n: int, k: int, splits: int, num_sms: int, batch_invariant: bool = False, max_cluster: int = MAX_CLUSTER
) -> HcConfig:
    """Choose the configuration for a problem: the candidate with the least estimated time.

    A row's bits depend only on the numbers of CTAs and teams that divide k. `batch_invariant` fixes both numbers.
    """
    clusters = (INVARIANT_CLUSTER,) if batch_invariant else range(1, min(num_sms, max_cluster) + 1)
    return min(
        (config for config in _candidates(n, batch_invariant) if config.cluster_size in clusters),
        key=lambda config: estimated_us(config, m, n, k, splits, num_sms),
    )


@lru_cache(len(COLUMNS) * 2)
def _candidates(n: int, batch_invariant: bool) -> tuple[HcConfig, ...]:
    few = COLUMNS[:1] if n > COLUMNS[0] else ()
    tiles = [*((block_m, n) for block_m in BLOCK_M), *((BLOCK_M[0], block_n) for block_n in few)]
    if batch_invariant:
        return tuple(HcConfig(*tile, INVARIANT_CLUSTER, INVARIANT_TEAMS) for tile in tiles)
    return tuple(HcConfig(*tile, cluster, TEAMS[tile[0]]) for tile in tiles for cluster in AT_ONCE)


def reachable_hc() -> list[HcConfig]:
    """List every configuration that `hc_config` can return."""
    found = (c for n in COLUMNS for is_invariant in (False, True) for c in _candidates(n, is_invariant))
    return list(dict.fromkeys(found))


KERNEL: Kernel[HcConfig] = Kernel(
    "hc_prenorm",
    "HcParams",
    reachable_hc,
    name="tf32_hc_prenorm_gemm",
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_bf16_header([2 * config.block_n])},
)
