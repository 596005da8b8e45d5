"""The configuration of the `fp8_paged_mqa_logits` kernel: the indexer's logits of keys in pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ..core.check.layout import align, ceil_div
from ..core.kernel import Config
from ..core.sm90 import REGISTERS_PER_SM, SHARED_BYTES_LIMIT, WARPGROUP_THREADS, WGMMA_K
from .paged_check import SEGMENT_KEYS

HEADS = tuple(range(8, 129, 8))
DEPTHS = (32, 64, 128)
PAGES = (32, 64)
MAX_NEXT_N = 4
MAX_COLUMNS = 256
"""Tokens x heads of a sequence."""
UNIT_COLUMNS = 128
"""Most columns of a unit, tokens x heads: one WGMMA. With more, the accumulators of two units would not fit."""
SLOTS = 2
BYTES_AHEAD = 5 * 128 * 132
"""Bytes of keys that a CTA asks for ahead. With more, SMs get unequal shares of the bandwidth, and one ends late."""
PRODUCER_REGISTERS = 40
OTHER_REGISTERS = 40
"""A math thread's registers besides accumulators and weights: addresses, counters, sums."""


@dataclass(frozen=True)
class PagedConfig(Config):
    """One configuration."""

    next_n: int
    """Tokens of a sequence."""
    heads: int
    depth: int
    """Bytes of a key."""
    page: int
    """Keys of a block of the cache."""
    output_bytes: int
    """4: logits in FP32; 2: in BF16."""
    run_blocks: int = 2
    """Blocks of keys that are worked on in a straight line, one's products beside the other's sums."""
    num_math_warpgroups: int = 2

    @property
    def name(self) -> str:
        """Short, for people; such as "2x64x128 page 64 fp32"."""
        dtype = "fp32" if self.output_bytes == 4 else "bf16"
        return f"{self.next_n}x{self.heads}x{self.depth} page {self.page} {dtype}"

    @property
    def units(self) -> int:
        """Units of a sequence: products whose accumulators fit twice."""
        return ceil_div(self.next_n, UNIT_COLUMNS // self.heads)

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        return ceil_div(self.next_n, self.units)

    @property
    def columns(self) -> int:
        """Columns of a unit."""
        return self.unit_tokens * self.heads

    @property
    def block_keys(self) -> int:
        """Keys that are loaded at a time: 64 for each math warpgroup."""
        return self.num_math_warpgroups * 64

    @property
    def num_threads(self) -> int:
        """Threads of a CTA: math warpgroups, and one for the producer's warp."""
        return (self.num_math_warpgroups + 1) * WARPGROUP_THREADS

    @property
    def registers_at_launch(self) -> int:
        """Registers of each thread before any gives up some."""
        return REGISTERS_PER_SM // self.num_threads // 8 * 8

    @property
    def needed_registers(self) -> int:
        """Registers that a math thread needs, as far as can be told."""
        return self.columns + self.units * align(self.columns, 16) // 4 + OTHER_REGISTERS

    @property
    def producer_registers(self) -> int | None:
        """Registers that the producer keeps; None if nobody needs what it would give up: it is slower with few."""
        return None if self.needed_registers <= self.registers_at_launch else PRODUCER_REGISTERS

    @property
    def math_registers(self) -> int | None:
        """Registers of a math thread: what the producer leaves, in eights; None if that gives up none."""
        if self.producer_registers is None:
            return None
        threads = self.num_math_warpgroups * WARPGROUP_THREADS
        left = self.registers_at_launch * self.num_threads - self.producer_registers * WARPGROUP_THREADS
        return min(left // threads // 8 * 8, 248)

    @property
    def num_stages(self) -> int:
        """Blocks of keys in shared memory."""
        slot = self.block_keys * (self.depth + 4)
        room = SHARED_BYTES_LIMIT - self._q_bytes - self._small_bytes - 2048
        return min(room // (slot + 16), BYTES_AHEAD // slot)

    @property
    def _q_bytes(self) -> int:
        return align(SLOTS * self.units * self.columns * self.depth, 1024)

    @property
    def _small_bytes(self) -> int:
        """Weights, rows, plans and barriers of sequences."""
        weights = self.units * align(self.columns, 16) * 4
        return SLOTS * (weights + self.units * self.unit_tokens * 16 + 8 + 16)

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in indexer/fp8_paged_mqa_logits.cuh, which asserts that it is the same."""
        keys = self.num_stages * self.block_keys
        return align(self._q_bytes + keys * self.depth + keys * 4 + self._small_bytes + self.num_stages * 16, 1024)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.heads in HEADS, f"a multiple of 8 heads up to {HEADS[-1]}"
        yield self.depth in DEPTHS, f"a depth of {DEPTHS}"
        yield self.page in PAGES, f"pages of {PAGES}"
        yield 1 <= self.next_n <= MAX_NEXT_N, f"1 to {MAX_NEXT_N} tokens of a sequence"
        yield self.next_n * self.heads <= MAX_COLUMNS, f"tokens x heads up to {MAX_COLUMNS}"
        yield self.output_bytes in (2, 4), "logits in FP32 or BF16"
        yield self.num_math_warpgroups == 2, "2 math warpgroups, which have the keys of half a segment"
        registers = self.math_registers or self.registers_at_launch
        yield self.needed_registers <= registers, f"{self.needed_registers} of {registers} registers"
        yield self.num_stages >= 3, "at least 3 stages"
        yield self.shared_bytes <= SHARED_BYTES_LIMIT, f"{self.shared_bytes} of {SHARED_BYTES_LIMIT} bytes shared"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes."""
        return {
            "kNextN": self.next_n,
            "kHeads": self.heads,
            "kDepth": self.depth,
            "kPage": self.page,
            "kOutputBytes": self.output_bytes,
            "kUnits": self.units,
            "kUnitTokens": self.unit_tokens,
            "kBlockKeys": self.block_keys,
            "kSegmentKeys": SEGMENT_KEYS,
            "kRunBlocks": self.run_blocks,
            "kNumStages": self.num_stages,
            "kMulticastCtas": 1,
            "kNumMathWarpgroups": self.num_math_warpgroups,
            "kNumMathWarps": self.num_math_warpgroups * 4,
            "kNumThreads": self.num_threads,
            "kProducerRegisters": self.producer_registers or 0,
            "kMathRegisters": self.math_registers or 0,
            "kSharedBytes": self.shared_bytes,
        }

    @property
    def products(self) -> int:
        """WGMMA instructions of the loop over runs, and of that over the blocks that are left."""
        return self.units * self.depth // WGMMA_K * (self.run_blocks + 1)


@cache
def paged_config(next_n: int, heads: int, depth: int, page: int, output_bytes: int) -> PagedConfig:
    """Configure the kernel for a problem."""
    return PagedConfig(next_n, heads, depth, page, output_bytes)
