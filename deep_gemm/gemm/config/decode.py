"""The configuration of the `fp8_gemm_decode` kernel, which multiplies few rows, and the rules that it must obey."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from ...core.check.layout import align, ceil_div
from ...core.check.recipes import E2M1, E4M3, MX, PER_BLOCK, PER_ROW, USUAL, WHOLE, Scales, Values
from ...core.check.ue8m0 import Words
from ...core.gpu import REGISTERS_PER_SM, SHARED_BYTES_LIMIT, WARPGROUP_THREADS, WGMMA_ROWS
from ...core.kernel import Config, constants_of
from ..kinds.epilogues import TO_D, Epilogue
from ..kinds.works import DENSE, TILE_SLOTS, Work
from .tall import BLOCK_K, EMPTY_BYTES, MAX_CLUSTER

SHARED_BYTES_PER_SM = 233472
RESERVED_SHARED_BYTES = 1024
"""Shared memory that the CUDA driver reserves for each block."""
MAX_REGISTERS = 255
MAX_STAGES = 24
MIN_STAGES = 4
"""Fewest stages of a configuration, half as many if a stage has two k-blocks: fewer do not hide memory's latency."""
SCALE_BLOCKS = 32
"""k-blocks whose scales are in shared memory at a time."""
SCALE_BLOCKS_OF_E2M1 = 16
FINE_SCALE_BLOCKS = (32, 16, 8, 4)
FINE_SCALES_ON_WAY = 20
"""Registers of a thread that may hold fine scales on their way from global to shared memory."""
FINE_SCALES_THERE = 2048
"""The most fine scales of a tile's tokens, or of 64 rows of B, that are in shared memory at a time."""
FINE_ROWS, FINE_COLUMNS = (1, 32, 64, 128), (32, 64, 128)
"""Rows and columns that a fine scale of B may cover; a fine scale of A may cover these columns."""
FRAGMENT_REGISTERS = 16
"""Registers for a thread's part of a k-block of B, if B is multiplied from registers."""
CHUNK_FLOATS = 128
"""Four accumulators of each lane of a warp: the chunk that the reduction deals out to CTAs."""
OTHER_REGISTERS = 24
"""A thread's registers for addresses, counters and scales, besides accumulators and registers that grow with them."""
WINDOW_ROWS = 512
"""The number of ids that a warp reads at a time."""
BLOCK_TOKENS = (8, 16, 24, 32, 48, 64, 96, 128)
DECODED = E4M3, E2M1
"""Values of B that the kernel can multiply."""


def registers_of(config: Any) -> int:
    """Registers that each thread may have if `ctas_per_sm` CTAs fit on an SM; warps get registers in groups of four."""
    warps: int = align(config.num_threads // 32 * config.ctas_per_sm, 4)
    return min(REGISTERS_PER_SM // (warps * 32) // 8 * 8, MAX_REGISTERS)


@dataclass(frozen=True)
class DecodeConfig(Config):
    """One configuration. A tile has `block_tokens` rows of D, and 64 columns for each math warpgroup."""

    block_tokens: int
    num_stages: int
    num_math_warpgroups: int = 1
    cluster_k: int = 1
    """CTAs that split the k of a tile and add up their sums."""
    ctas_per_sm: int = 1
    is_fp32: bool = False
    with_c: bool = False
    """True if C is read and added; C may be D itself."""
    c_is_fp32: bool = False
    """True if C is FP32 and D is BF16."""
    work: Work = DENSE
    """The rows that each B multiplies: all rows, or the rows of its head or group."""
    epilogue: Epilogue = TO_D
    """Columns of D that are stored: all, or the two parts of each head with unwritten columns between them."""
    b: Values = E4M3
    """Values of B; E2M1 is converted to E4M3 in registers."""
    sfb: Scales = PER_BLOCK
    """The rows and columns of B under one scale."""
    sfa: Scales = PER_ROW
    """The rows and columns of A under one scale."""
    block_k: ClassVar[int] = BLOCK_K
    """Values of a k-block."""

    @property
    def name(self) -> str:
        """Short name: columns x tokens, CTAs along k, CTAs an SM, output; such as "128x16/k3 2/SM bf16+c"."""
        cluster = f"/k{self.cluster_k}" * (self.cluster_k > 1)
        output = ("fp32" if self.is_fp32 else "bf16") + "+c" * self.with_c + "32" * self.c_is_fp32
        kind = self.work.suffix + self.epilogue.suffix + " fp4" * self.is_fp4
        if self.is_fine or self.sfa == WHOLE:
            kind += f" {self.sfa.rows}x{self.sfa.columns} by {self.sfb.rows}x{self.sfb.columns}"
        return f"{self.block_n}x{self.block_tokens}{cluster} {self.ctas_per_sm}/SM {output}{kind}"

    @property
    def block_n(self) -> int:
        """Columns of D in a tile."""
        return self.num_math_warpgroups * WGMMA_ROWS

    @property
    def num_threads(self) -> int:
        """Threads of a block: the math warpgroups and the producer's warp."""
        return self.num_math_warpgroups * WARPGROUP_THREADS + 32

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_k

    registers_limit = property(registers_of)

    @property
    def exchange_bytes(self) -> int:
        """Shared memory for the sums of the other CTAs of the cluster; alone, a CTA has four unused floats."""
        if self.cluster_k == 1:
            return 4 * 4
        chunks = self.block_tokens // 8 * self.num_math_warpgroups * 4
        return self.cluster_k * ceil_div(chunks, self.cluster_k) * CHUNK_FLOATS * 4

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in gemm/fp8_gemm_decode.cuh, which asserts that it is the same."""
        operands = self.num_stages * (self.block_n + self.block_tokens * self.slot_blocks) * BLOCK_K
        barriers = (self.num_stages * 2 + 1) * 8
        return align(operands + self.exchange_bytes + self.scale_bytes + barriers + self.work_bytes, 1024)

    @property
    def work_bytes(self) -> int:
        """Size of `Tiles::Storage`: for grouped rows a queue of tiles, and a buffer in which warps transpose D."""
        if not self.work.queue:
            return EMPTY_BYTES
        queue = self.work.queue_bytes(self.block_tokens, WINDOW_ROWS)
        return align(queue, 16) + self.num_math_warpgroups * 4 * CHUNK_FLOATS * 4

    @property
    def is_fp4(self) -> bool:
        """Tell whether B is E2M1, not E4M3."""
        return self.b == E2M1

    @property
    def is_fine(self) -> bool:
        """Tell whether B is E4M3, and scales are finer than 1x128 by 128x128."""
        return self.b == E4M3 and (self.sfa, self.sfb) != USUAL and self.sfa != WHOLE

    @property
    def reads_words(self) -> Words:
        """Operands whose scales may be words of UE8M0: both if scales are fine, B if it is FP4."""
        return Words.A | Words.B if self.is_fine else Words.B if self.is_fp4 else Words.NONE

    @property
    def num_partials(self) -> int:
        """The number of partial sums, each of a part of a k-block, that a thread keeps at a time if scales are fine."""
        parts = BLOCK_K // min(self.sfa.columns, self.sfb.columns)
        return min(parts, 4 if self.block_tokens <= 16 else 2)

    @property
    def fine_scale_blocks(self) -> int:
        """k-blocks whose fine scales are in shared memory at a time; shared memory and registers limit the number."""
        *more, least = FINE_SCALE_BLOCKS
        most = FINE_SCALES_THERE // max(self.fine_scales_of_tokens, self.fine_scales_of_rows)
        return next((some for some in more if some <= most and self.fine_registers(some) <= FINE_SCALES_ON_WAY), least)

    def fine_registers(self, k_blocks: int) -> int:
        """Count the registers into which a thread loads its part of the fine scales of `k_blocks` k-blocks."""
        of_rows, of_tokens = k_blocks * self.fine_scales_of_rows, k_blocks * self.fine_scales_of_tokens
        return ceil_div(of_rows, WARPGROUP_THREADS) + ceil_div(of_tokens, self.num_math_warpgroups * WARPGROUP_THREADS)

    @property
    def fine_scales_of_rows(self) -> int:
        """Fine scales that 64 rows of B have in a k-block."""
        return max(WGMMA_ROWS // self.sfb.rows, 1) * (BLOCK_K // self.sfb.columns)

    @property
    def fine_scales_of_tokens(self) -> int:
        """Fine scales that the tokens of a tile have in a k-block."""
        return self.block_tokens * (BLOCK_K // self.sfa.columns)

    @property
    def slot_blocks(self) -> int:
        """k-blocks of a slot: a line of 128 bytes of B holds one in E4M3, two in E2M1."""
        return 2 if self.is_fp4 else 1

    @property
    def scale_bytes(self) -> int:
        """Size of `ScaleStorage`."""
        if self.is_fine:
            of_rows = self.num_math_warpgroups * self.fine_scales_of_rows
            return self.fine_scale_blocks * (self.fine_scales_of_tokens + of_rows) * 4
        if not self.is_fp4:
            return 4 * 4 if self.sfa == WHOLE else SCALE_BLOCKS * self.block_tokens * 4
        return SCALE_BLOCKS_OF_E2M1 * (self.block_n * 8 + self.block_tokens * 4 + self.num_math_warpgroups * 8)

    def ctas(self, m: int, n: int, num_sms: int = 0, groups: int = 1) -> int:
        """Count the CTAs for `groups` products: a cluster for each tile of D.

        Grouped rows get the CTAs that run at once, but no more than tiles can exist (a tile has at least a row).
        """
        tiles_n = ceil_div(n, self.block_n)
        if self.work.groups_rows:
            return min(num_sms * self.ctas_per_sm, groups * m * tiles_n)
        return groups * ceil_div(m, self.block_tokens) * tiles_n * self.cluster_k

    def slot_bytes(self, m: int, n: int) -> int:
        """Count the bytes that TMA writes into a slot of the ring: a box of A and a box of B."""
        return (min(self.block_tokens, m) * self.slot_blocks + min(self.block_n, n)) * BLOCK_K

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.block_tokens in BLOCK_TOKENS, f"block_tokens of {BLOCK_TOKENS}"
        yield self.b in DECODED, "values of B that gemm/decode has a file for"
        most = 4 if self.is_fp4 else 2
        yield 1 <= self.num_math_warpgroups <= most, "1 or 2 math warpgroups, so that one block of scales covers a tile"
        yield 1 <= self.cluster_k <= MAX_CLUSTER, "clusters of 1 to 8"
        yield 1 <= self.ctas_per_sm <= most, f"up to {most} CTAs an SM"
        yield self.ctas_per_sm == 1 or self.block_tokens <= 64, "one CTA an SM for more than 64 tokens"
        yield self.num_stages >= 2, "at least 2 stages"
        if self.work.groups_rows:
            yield self.cluster_k == 1, "no split of k if rows are grouped"
        tile_bytes = self.block_tokens * self.block_n * 4
        yield (
            self.work.groups_rows or self.cluster_k > 1 or self.num_stages * self.block_n * BLOCK_K >= tile_bytes,
            "a ring that can hold an FP32 tile of D, which is transposed there",
        )
        if self.is_fine:
            yield self.block_tokens <= 64, "at most 64 tokens, because partial sums of parts take registers too"
            yield (
                self.sfa.rows == 1 and self.sfa.columns in FINE_COLUMNS,
                f"scales of A for a row and one of {FINE_COLUMNS} columns",
            )
            yield (
                self.sfb.rows in FINE_ROWS and self.sfb.columns in FINE_COLUMNS,
                f"scales of B for one of {FINE_ROWS} rows and one of {FINE_COLUMNS} columns",
            )
        elif self.is_fp4:
            yield (self.sfa, self.sfb) == (PER_ROW, MX), "scales of 1x128 and 1x32 for FP4"
        # Totals and partial sums; scales of a k-block, if they fit in registers; scales that are being loaded.
        registers = self.block_tokens + (self.block_tokens // 4 if self.block_tokens <= 64 else 0)
        threads = self.num_math_warpgroups * WARPGROUP_THREADS
        if self.is_fine:
            registers += (self.num_partials - 1) * self.block_tokens // 2
            registers += BLOCK_K // self.sfb.columns * (2 if self.sfb.rows == 1 else 1)
            registers += self.fine_registers(self.fine_scale_blocks)
        else:
            registers += SCALE_BLOCKS * self.block_tokens // threads
        if self.is_fp4:
            registers += FRAGMENT_REGISTERS + SCALE_BLOCKS_OF_E2M1 * WGMMA_ROWS // WARPGROUP_THREADS
            if self.block_tokens <= 32:  # two k-blocks at a time
                registers += FRAGMENT_REGISTERS + self.block_tokens // 2
        yield (
            registers + OTHER_REGISTERS <= self.registers_limit,
            f"{registers} + {OTHER_REGISTERS} of {self.registers_limit} registers",
        )
        yield not (self.epilogue.skips_mid and self.with_c), "no C if columns of D are skipped"
        limit = min(SHARED_BYTES_PER_SM // self.ctas_per_sm - RESERVED_SHARED_BYTES, SHARED_BYTES_LIMIT)
        yield self.shared_bytes <= limit, f"{self.shared_bytes} of {limit} bytes shared"

    def choices(self) -> dict[str, str]:
        """Return the files that find the tiles and multiply B."""
        work = "skip_mid" if self.epilogue.skips_mid else self.work.decode
        b = "fine" if self.is_fine else "whole" if self.sfa == WHOLE else self.b.name
        return {"DECODE_WORK": f"decode/{work}.cuh", "DECODE_B": f"decode/{b}.cuh"}

    def constants(self) -> dict[str, int | bool]:
        """Return the numbers and switches that the source needs."""
        of_rows = {
            "kGroups": self.work.number,
            "kBlockM": self.block_tokens,
            "kTileSlots": TILE_SLOTS,
            "kWindowRows": self.work.window_rows(WINDOW_ROWS),
            "kRunWords": self.work.run_words(self.block_tokens),
        }
        return {
            **constants_of(self, "block_tokens", "block_n", "block_k", "slot_blocks", "num_stages", "num_threads"),
            **constants_of(self, "ctas_per_sm", "cluster_k", "shared_bytes", "with_c"),
            **(of_rows if self.work.groups_rows else {}),
            **(self.constants_of_fine_scales() if self.is_fine else {}),
            "kNumMathWarps": self.num_math_warpgroups * 4,
            "kClusterN": 1,
            "kMulticastCtas": 1,  # a CTA loads into its own slots only
            "kOutputBytes": 4 if self.is_fp32 else 2,
            "kOutputIsFp32": self.is_fp32,
            "kCIsFp32": self.is_fp32 or self.c_is_fp32,
            "kCBytes": 4 if self.is_fp32 or self.c_is_fp32 else 2,
        }

    def constants_of_fine_scales(self) -> dict[str, int | bool]:
        """Return the further constants that decode/fine.cuh needs."""
        return {
            "kColumnsOfA": self.sfa.columns,
            "kRowsOfB": self.sfb.rows,
            "kColumnsOfB": self.sfb.columns,
            "kScaleBlocks": self.fine_scale_blocks,
            "kNumPartials": self.num_partials,
        }


@cache
def decode_config(
    block_tokens: int, num_math_warpgroups: int, cluster_k: int, ctas_per_sm: int, **others: Any
) -> DecodeConfig | None:
    """Configure the kernel with all the stages that fit; None if too few fit, or the kernel cannot be built."""
    least = MIN_STAGES // (2 if others.get("b") == E2M1 else 1)
    config = DecodeConfig(block_tokens, least, num_math_warpgroups, cluster_k, ctas_per_sm, **others)
    if config.why_illegal() is not None:
        return None
    while config.num_stages < MAX_STAGES:
        deeper = replace(config, num_stages=config.num_stages + 1)
        if deeper.why_illegal() is not None:
            break
        config = deeper
    return config
