"""A configuration of the indexer's logits, for keys in rows or in pages (`keys`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar

from ..core.check.layout import align, ceil_div
from ..core.gpu import REGISTERS_PER_SM, SHARED_BYTES_LIMIT, WARPGROUP_THREADS, WGMMA_K, WGMMA_ROWS
from ..core.kernel import CodePlan, Config, constants_of
from .check import DEPTHS, HEADS, MAX_COLUMNS, MAX_NEXT_N, PAGES, SEGMENT_KEYS

UNIT_COLUMNS = 128
"""The most columns of a unit, tokens x heads: one WGMMA. With more, two units' accumulators would not fit."""
SLOTS = 2
"""Tiles of tokens in shared memory: math warps compute one while the other is loaded."""
MATH_WARPGROUPS = 2
MATH_THREADS = MATH_WARPGROUPS * WARPGROUP_THREADS
NUM_THREADS = MATH_THREADS + WARPGROUP_THREADS
"""Threads of two math warpgroups, and of one warpgroup with the producer's warp and the warps that fill."""
BLOCK_KEYS = MATH_WARPGROUPS * WGMMA_ROWS
"""Keys that are loaded at a time: 64 for each math warpgroup."""
PRODUCER_REGISTERS = 40
OTHER_REGISTERS = 40
"""A math thread's registers besides accumulators and weights: addresses, counters, sums."""
LAUNCH_REGISTERS = REGISTERS_PER_SM // NUM_THREADS // 8 * 8
"""Registers of each thread at launch, before roles move registers."""
MATH_REGISTERS = (LAUNCH_REGISTERS * NUM_THREADS - PRODUCER_REGISTERS * WARPGROUP_THREADS) // MATH_THREADS // 8 * 8
"""Registers of a math thread: its share of the registers that the producer does not keep, in multiples of 8."""
FILL_KEYS = 256
"""Columns of a row that are filled at a time. Rows have this many extra columns, which the caller does not see."""
BYTES_AHEAD = 5 * 128 * 132
"""Bytes of keys in pages that a CTA loads ahead. With more, SMs share the bandwidth unequally, and one ends late."""
USUAL_HEADS, USUAL_DEPTH = (32, 64), 128
USUAL_PAGE = 64
"""Sizes of existing models."""


@dataclass(frozen=True)
class InRows:
    """Keys in consecutive rows; each token has a range of keys."""

    run_blocks: ClassVar = 4
    """Blocks of keys in a run: the products of one block overlap with the sums of the previous block."""
    always_moves_registers: ClassVar = True
    share_bytes: ClassVar = 8 * (NUM_THREADS // 32) + 16
    """Size of `ShareStorage` in indexer/logits/shares.cuh."""
    page: ClassVar = USUAL_PAGE
    is_compressed: bool = False
    """True if a row begins with its token's first key."""
    is_clean: bool = False
    """True if logits outside a token's range become -inf."""

    def name_of(self, size: str, dtype: str) -> str:
        """Name a configuration, such as "64x128 fp32 clean"."""
        return f"{size} {dtype}" + " compressed" * self.is_compressed + " clean" * self.is_clean

    def units(self, heads: int) -> int:
        """Count the units of a tile: one unit is reduced while the tensor cores multiply the other."""
        return 2

    def tokens(self, heads: int) -> int:
        """Count the tokens of a tile: its units have a column for each head of a token."""
        return self.units(heads) * (UNIT_COLUMNS // heads)

    def most_stages(self, slot_bytes: int) -> int:
        """Return the most blocks of keys that are loaded ahead."""
        return 8

    def rules(self, heads: int) -> Iterator[tuple[bool, str]]:
        """Yield the (holds, rule) pairs that apply to keys in rows only."""
        yield not (self.is_compressed and self.is_clean), "rows that are compressed or clean, not both"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers that only this kernel's source needs."""
        return {"kInPages": False, "kFillKeys": FILL_KEYS, "kFillWarps": WARPGROUP_THREADS // 32 - 1}


@dataclass(frozen=True)
class InPages:
    """Keys in pages of a cache; each token of a sequence has the keys below its context."""

    run_blocks: ClassVar = 2
    always_moves_registers: ClassVar = False
    share_bytes: ClassVar = 0
    next_n: int
    """Tokens of a sequence."""
    page: int
    """Keys of a block of the cache."""

    def name_of(self, size: str, dtype: str) -> str:
        """Name a configuration, such as "2x64x128 page 64 fp32"."""
        return f"{self.next_n}x{size} page {self.page} {dtype}"

    def units(self, heads: int) -> int:
        """Count the units of a sequence: the accumulators of two units must fit."""
        return ceil_div(self.next_n, UNIT_COLUMNS // heads)

    def tokens(self, heads: int) -> int:
        """Count the tokens of a tile: a sequence's tokens, in whole units."""
        return align(self.next_n, self.units(heads))

    def most_stages(self, slot_bytes: int) -> int:
        """Return the most blocks of keys that are loaded ahead."""
        return BYTES_AHEAD // slot_bytes

    def rules(self, heads: int) -> Iterator[tuple[bool, str]]:
        """Yield the (holds, rule) pairs that apply to keys in pages only."""
        yield self.page in PAGES, f"pages of {PAGES}"
        yield 1 <= self.next_n <= MAX_NEXT_N, f"1 to {MAX_NEXT_N} tokens of a sequence"
        yield self.next_n * heads <= MAX_COLUMNS, f"tokens x heads up to {MAX_COLUMNS}"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers that only this kernel's source needs."""
        return {"kInPages": True, "kIsClean": False, "kSegmentKeys": SEGMENT_KEYS}


@dataclass(frozen=True)
class LogitsConfig(Config):
    """One configuration of a kernel of logits."""

    heads: int
    depth: int
    """Bytes of a key."""
    output_bytes: int
    """4 if logits are FP32, 2 if they are BF16."""
    keys: InRows | InPages
    num_threads = NUM_THREADS

    @property
    def name(self) -> str:
        """Short name for people."""
        return self.keys.name_of(f"{self.heads}x{self.depth}", "fp32" if self.output_bytes == 4 else "bf16")

    @property
    def units(self) -> int:
        """Units of a tile."""
        return self.keys.units(self.heads)

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return self.keys.tokens(self.heads)

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        return self.tile_tokens // self.units

    @property
    def columns(self) -> int:
        """Columns of a unit."""
        return self.unit_tokens * self.heads

    @property
    def laid_weights(self) -> int:
        """Floats for the weights of a tile in shared memory."""
        return self.units * align(self.columns, 16)

    @property
    def needed_registers(self) -> int:
        """Estimated registers of a math thread: accumulators of two units, weights, and others."""
        return self.columns + self.laid_weights // 4 + OTHER_REGISTERS

    @property
    def moves_registers(self) -> bool:
        """Tell whether the producer gives up registers: this slows it down, so only if math threads need them."""
        return self.keys.always_moves_registers or self.needed_registers > LAUNCH_REGISTERS

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block of keys and their scales."""
        return BLOCK_KEYS * (self.depth + 4)

    @property
    def fixed_bytes(self) -> int:
        """Shared memory besides blocks of keys: queries, weights, rows, plans and barriers of tiles, and shares."""
        q = align(SLOTS * self.units * self.columns * self.depth, 1024)
        return q + SLOTS * (self.laid_weights * 4 + self.tile_tokens * 16 + 8 + 16) + self.keys.share_bytes

    @property
    def num_stages(self) -> int:
        """Blocks of keys that shared memory holds: the most that fit, but at most `keys.most_stages`."""
        fitting = (SHARED_BYTES_LIMIT - self.fixed_bytes - 2048) // (self.slot_bytes + 16)
        return min(fitting, self.keys.most_stages(self.slot_bytes))

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in the kernel's source, which asserts that it is the same."""
        return align(self.fixed_bytes + self.num_stages * (self.slot_bytes + 16), 1024)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.heads in HEADS, f"a multiple of 8 heads up to {HEADS[-1]}"
        yield self.depth in DEPTHS, f"a depth of {DEPTHS}"
        yield self.output_bytes in (2, 4), "logits in FP32 or BF16"
        yield from self.keys.rules(self.heads)
        registers = MATH_REGISTERS if self.moves_registers else LAUNCH_REGISTERS
        yield self.needed_registers <= registers, f"{self.needed_registers} of {registers} registers"
        yield self.num_stages >= 3, "at least 3 stages"
        yield self.shared_bytes <= SHARED_BYTES_LIMIT, f"{self.shared_bytes} of {SHARED_BYTES_LIMIT} bytes shared"

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source needs."""
        return {
            **constants_of(self, "heads", "depth", "output_bytes", "units", "unit_tokens", "num_stages"),
            **constants_of(self, "num_threads", "shared_bytes"),
            **constants_of(self.keys, "run_blocks", *(field.name for field in fields(self.keys))),
            **self.keys.constants(),
            "kBlockKeys": BLOCK_KEYS,
            "kMulticastCtas": 1,
            "kNumMathWarpgroups": MATH_WARPGROUPS,
            "kNumMathWarps": MATH_WARPGROUPS * 4,
            "kProducerRegisters": PRODUCER_REGISTERS if self.moves_registers else 0,
            "kMathRegisters": MATH_REGISTERS if self.moves_registers else 0,
        }


logits_config = cache(LogitsConfig)
"""Returns the configuration for heads, depth, bytes of a logit, and keys."""


def reachable_rows() -> list[LogitsConfig]:
    """List every configuration for keys in rows."""
    return [
        logits_config(heads, depth, output_bytes, form)
        for heads in HEADS
        for depth in DEPTHS
        for output_bytes in (4, 2)
        for form in (InRows(), InRows(is_clean=True), InRows(is_compressed=True))
    ]


def reachable_pages() -> list[LogitsConfig]:
    """List every configuration for keys in pages."""
    return [
        logits_config(heads, depth, output_bytes, InPages(next_n, page))
        for next_n in range(1, MAX_NEXT_N + 1)
        for heads in HEADS
        if next_n * heads <= MAX_COLUMNS
        for depth in DEPTHS
        for page in PAGES
        for output_bytes in (4, 2)
    ]


def is_usual(config: LogitsConfig) -> bool:
    """Tell whether existing models use such logits."""
    return config.heads in USUAL_HEADS and config.depth == USUAL_DEPTH and config.keys.page == USUAL_PAGE


def code_plan(config: LogitsConfig) -> CodePlan:
    """Derive the instructions of the machine code. Ordinary stores write the logits."""
    producer, math = (PRODUCER_REGISTERS, MATH_REGISTERS) if config.moves_registers else (None, None)
    return CodePlan(
        roles=((WARPGROUP_THREADS, producer), (MATH_THREADS, math)),
        shared_bytes=config.shared_bytes,
        # One loop over runs, and one over the blocks that remain.
        qgmma=config.units * config.depth // WGMMA_K * (config.keys.run_blocks + 1),
        tma_loads=config.units + 4,  # q for each unit; keys and scales, in two loops
    )
