"""The configuration of the `linear_decode` kernel: the tile of a product of few rows, whose CTAs cast these rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from ..core.check.layout import align, ceil_div
from ..core.kernel import Config
from ..core.sm90 import REGISTERS_PER_SM, SHARED_BYTES_LIMIT, WARPGROUP_THREADS
from ..gemm.config import BLOCK_K, MAX_CLUSTER
from ..gemm.config_decode import (
    BLOCK_TOKENS,
    MAX_REGISTERS,
    MAX_STAGES,
    OTHER_REGISTERS,
    RESERVED_SHARED_BYTES,
    SHARED_BYTES_PER_SM,
    DecodeConfig,
)

CASTERS = 2 * WARPGROUP_THREADS
"""Threads of a CTA that cast, besides those that load and those that multiply.

With half as many a cast of 16 rows takes longer than memory hides.
"""
LANES = 16
"""Casters that share a block, a token's 128 columns: 8 columns each."""
ROOMS = 2
"""Groups of A in shared memory at a time: one is multiplied, and one is cast."""
GROUP_BLOCKS = 128
MAX_BLOCKS_OF_TEAM = 4
"""More blocks at a time are fewer steps, but the first of them is multiplied later."""
CASTING_REGISTERS = 40
"""A caster's registers for addresses, counters, keys and quotients, besides those that hold its blocks."""
MIN_STAGES = 2
MAX_ROWS = 16
"""CTAs send each other what they cast, and with more rows that takes longer than a launch and a trip through memory."""
FEW_BLOCKS = 32
"""So many blocks a CTA casts without help: sending them to others costs more than casting them."""
MAX_CLUSTER_N = 4
MOST_BLOCKS, MOST_ROWS = 128, 8
"""A CTA casts either at most so many blocks, or, counted with those who help it, so many rows.

More take longer than the wait for B.
"""


@dataclass(frozen=True)
class LinearDecodeConfig(Config):
    """One configuration: `tile` is computed as `fp8_gemm_decode` computes it, with stages for B alone."""

    tile: DecodeConfig
    cluster_n: int
    """CTAs, with tiles beside each other, that share out the cast of the rows that they all multiply."""

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.tile.name} casting/n{self.cluster_n}"

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_n * self.tile.cluster_k

    @property
    def num_threads(self) -> int:
        """Threads of a block: the tile's, and the casters."""
        return self.tile.num_threads + CASTERS

    @property
    def registers_limit(self) -> int:
        """Registers that each thread may have for so many blocks to fit on an SM, which counts warps by fours."""
        warps = align(self.num_threads // 32 * self.tile.ctas_per_sm, 4)
        return min(REGISTERS_PER_SM // (warps * 32) // 8 * 8, MAX_REGISTERS)

    @property
    def blocks_of_team(self) -> int:
        """Blocks that a caster takes part in at a time."""
        return min(GROUP_BLOCKS // (CASTERS // LANES * self.cluster_n), MAX_BLOCKS_OF_TEAM)

    @property
    def group_blocks(self) -> int:
        """Blocks that a cluster casts for a part of k, and then multiplies, at a time."""
        return self.blocks_of_team * (CASTERS // LANES) * self.cluster_n

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in linear/linear_decode.cuh, which asserts that it is the same."""
        ring = self.tile.num_stages * self.tile.block_n * BLOCK_K
        a, scales = (ROOMS * self.group_blocks * size for size in (BLOCK_K, 4))
        barriers = (self.tile.num_stages * 2 + 1 + ROOMS * 2) * 8
        return align(ring + a + self.tile.exchange_bytes + scales + barriers, 1024)

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        tile = self.tile
        yield not tile.is_fp32, "BF16 output"
        yield 2 <= self.cluster <= MAX_CLUSTER, f"clusters of 2 to {MAX_CLUSTER}"
        yield (
            self.blocks_of_team * self.cluster_n <= LANES and GROUP_BLOCKS % self.cluster_n == 0,
            f"1, 2, 4 or 8 CTAs that share out a cast of {GROUP_BLOCKS} blocks",
        )
        yield self.group_blocks % tile.block_tokens == 0, f"a divisor of {self.group_blocks} tokens"
        yield tile.num_stages >= MIN_STAGES, f"at least {MIN_STAGES} stages"
        tile_bytes = tile.block_tokens * tile.block_n * 4
        yield (
            tile.cluster_k > 1 or tile.num_stages * tile.block_n * BLOCK_K >= tile_bytes,
            "a ring that holds a tile of FP32, which is transposed there",
        )
        # Totals, partial sums and scales of a k-block; and what is going to be cast.
        registers = max(
            tile.block_tokens + tile.block_tokens // 4 + OTHER_REGISTERS, 4 * self.blocks_of_team + CASTING_REGISTERS
        )
        yield registers <= self.registers_limit, f"{registers} of {self.registers_limit} registers"
        limit = min(SHARED_BYTES_PER_SM // tile.ctas_per_sm - RESERVED_SHARED_BYTES, SHARED_BYTES_LIMIT)
        yield self.shared_bytes <= limit, f"{self.shared_bytes} of {limit} bytes shared"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes."""
        casting = {
            "kInputBytes": 2,
            "kVector": BLOCK_K // LANES,
            "kClusterN": self.cluster_n,
            "kNumThreads": self.num_threads,
            "kBlocksOfTeam": self.blocks_of_team,
            "kSharedBytes": self.shared_bytes,
        }
        inputs = {"kInputIsFp32": False, "kInputIsFp16": False, "kActivates": False}
        return {**self.tile.constants(), **casting, **inputs}


def serving(m: int, k: int, product: DecodeConfig) -> LinearDecodeConfig | None:
    """Configure the kernel for a product that would have this tile; None if a cast of its own is better."""
    blocks = m * ceil_div(ceil_div(k, BLOCK_K), product.cluster_k)
    cluster_n = 1 if product.cluster_k > 1 else 2
    most = min(MAX_CLUSTER_N, MAX_CLUSTER // product.cluster_k)
    while cluster_n * 2 <= most and blocks > FEW_BLOCKS * cluster_n:
        cluster_n *= 2
    if m > MAX_ROWS or (blocks > MOST_BLOCKS * cluster_n and m > MOST_ROWS * cluster_n):
        return None
    tokens = next(size for size in BLOCK_TOKENS if size >= m)
    return linear_decode_config(replace(product, block_tokens=tokens), cluster_n)


@cache
def linear_decode_config(product: DecodeConfig, cluster_n: int) -> LinearDecodeConfig | None:
    """Configure the kernel for the tile of a product, with all the stages that fit; None where it cannot be built."""
    found = None
    for num_stages in range(MIN_STAGES, MAX_STAGES + 1):
        config = LinearDecodeConfig(replace(product, num_stages=num_stages), cluster_n)
        if config.why_illegal() is None:
            found = config
    return found
