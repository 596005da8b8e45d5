"""The configuration of the `linear_decode` kernel: the tile of a product of few rows, whose CTAs cast these rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from ..problem.layout import align, ceil_div
from .config import BLOCK_K, SHARED_BYTES_LIMIT, WARPGROUP_THREADS
from .config_decode import (
    MAX_STAGES,
    RESERVED_SHARED_BYTES,
    SHARED_BYTES_PER_SM,
    DecodeConfig,
    header_of,
)

LANES = 16
"""Threads that cast a block, a token's 128 columns: 8 columns each."""
BLOCKS_OF_THREAD = 8
"""Blocks that a thread takes part in before they are multiplied. More of them are more code, which is fetched anew by
each launch, and more registers; with fewer, threads wait for each other more often."""
CASTING_REGISTERS = 40
"""A thread's registers for addresses, counters, keys and quotients, besides those that grow with the tile."""
MIN_STAGES = 2
MAX_ROWS, MAX_BLOCKS = 8, 160
"""Rows, and rows times k-blocks of a CTA, up to which a layer casts them in each CTA anew.

More of them take more instructions, and more bytes that each CTA loads, than the wait for B hides.
"""


@dataclass(frozen=True)
class LinearDecodeConfig:
    """One configuration: `tile` is computed as `fp8_gemm_decode` computes it, with stages for B alone."""

    tile: DecodeConfig

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.tile.name} casting"

    @property
    def group_k_blocks(self) -> int:
        """k-blocks whose A is in shared memory at a time."""
        return self.group_blocks // self.tile.block_tokens

    @property
    def group_blocks(self) -> int:
        """Blocks that are cast, and then multiplied, at a time."""
        return BLOCKS_OF_THREAD * self.tile.num_math_warpgroups * WARPGROUP_THREADS // LANES

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in cuda/linear_decode.cuh, which asserts that it is the same."""
        ring = self.tile.num_stages * self.tile.block_n * BLOCK_K
        a, scales, barriers = self.group_blocks * BLOCK_K, self.group_blocks * 4, (self.tile.num_stages * 2 + 1) * 8
        return align(ring + a + self.tile.exchange_bytes + scales + barriers, 1024)

    def why_illegal(self) -> str | None:
        """Say why the kernel cannot be built so; None if it can."""
        return next((f"needs {rule}" for holds, rule in self._rules() if not holds), None)

    def _rules(self) -> Iterator[tuple[bool, str]]:
        tile = self.tile
        yield not tile.output_is_fp32, "BF16 output"
        yield self.group_blocks % tile.block_tokens == 0, f"a divisor of {self.group_blocks} tokens"
        yield tile.num_stages >= MIN_STAGES, f"at least {MIN_STAGES} stages"
        tile_bytes = tile.block_tokens * tile.block_n * 4
        yield (
            tile.cluster_k > 1 or tile.num_stages * tile.block_n * BLOCK_K >= tile_bytes,
            "a ring that holds a tile of FP32, which is transposed there",
        )
        # Totals, partial sums and scales of a k-block, and what is going to be cast.
        registers = tile.block_tokens + tile.block_tokens // 4 + 4 * BLOCKS_OF_THREAD
        yield (
            registers + CASTING_REGISTERS <= tile.registers_limit,
            f"{registers} + {CASTING_REGISTERS} of {tile.registers_limit} registers",
        )
        limit = min(SHARED_BYTES_PER_SM // tile.ctas_per_sm - RESERVED_SHARED_BYTES, SHARED_BYTES_LIMIT)
        yield self.shared_bytes <= limit, f"{self.shared_bytes} of {limit} bytes shared"

    def header(self) -> str:
        """Give `config.cuh`: every constant that the kernel's source takes from its configuration."""
        casting = {
            "kInputBytes": 2,
            "kVector": BLOCK_K // LANES,
            "kGroupKBlocks": self.group_k_blocks,
            "kSharedBytes": self.shared_bytes,
        }
        inputs = {"kInputIsFp32": False, "kInputIsFp16": False, "kActivates": False}
        return header_of({**self.tile.constants(), **casting}, {**self.tile.switches(), **inputs})


def is_worth_casting(m: int, k: int, product: DecodeConfig) -> bool:
    """Tell whether CTAs of a product's tile cast so little that it costs less than a launch."""
    return m <= MAX_ROWS and m * ceil_div(ceil_div(k, BLOCK_K), product.cluster_k) <= MAX_BLOCKS


@cache
def linear_decode_config(product: DecodeConfig) -> LinearDecodeConfig | None:
    """Configure the kernel for the tile of a product, with all the stages that fit; None where it cannot be built."""
    found = None
    for num_stages in range(MIN_STAGES, MAX_STAGES + 1):
        config = LinearDecodeConfig(replace(product, num_stages=num_stages))
        if config.why_illegal() is None:
            found = config
    return found
