"""The kernel of indexer/fp8_paged_mqa_logits.cuh: the indexer's logits of keys in pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ..core.call import CallPlan
from ..core.check.layout import align, ceil_div
from ..core.code_plan import CodePlan
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import Config, Kernel
from ..core.params import Field, Kind, Params
from ..core.settings import num_sms_of
from ..core.sm90 import REGISTERS_PER_SM, SHARED_BYTES_LIMIT, WARPGROUP_THREADS, WGMMA_K
from ..core.wgmma_header import wgmma_header
from .check import DEPTHS, HEADS
from .kernel import OTHER_REGISTERS, PRODUCER_REGISTERS, UNIT_COLUMNS, USUAL_DEPTH, USUAL_HEADS, logits_plan
from .paged_check import MAX_COLUMNS, MAX_NEXT_N, PAGES, SEGMENT_KEYS, PagedLogits, block_stride

ADDRESSES = ("map_q", "map_keys", "map_scales", "weights", "contexts", "table", "schedule", "logits")
SLOTS = 2
BYTES_AHEAD = 5 * 128 * 132
"""Bytes of keys that a CTA asks for ahead. With more, SMs get unequal shares of the bandwidth, and one ends late."""
PARAMS = Params(
    "PagedParams",
    Field("map_q", Kind.MAP),
    Field("map_keys", Kind.MAP),
    Field("map_scales", Kind.MAP),
    Field("weights", Kind.POINTER),
    Field("contexts", Kind.POINTER),
    Field("table", Kind.POINTER),
    Field("schedule", Kind.POINTER),
    Field("logits", Kind.POINTER),
    Field("weights_pitch", Kind.UINT64),
    Field("table_pitch", Kind.UINT64),
    Field("logits_pitch", Kind.UINT64),
    Field("sequences", Kind.UINT32),
    Field("cache_blocks", Kind.UINT32),
    Field("contexts_pitch", Kind.UINT32),
    Field("contexts_step", Kind.UINT32),
    Field("most_keys", Kind.UINT32),
    Field("splits", Kind.UINT32),
)
"""`PagedParams` of indexer/logits/paged_params.cuh."""


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


def run(p: PagedLogits) -> CallPlan | None:
    """Compute the logits on the GPU that the operands are on, and give the plan, which serves other calls."""
    device, config = p.q.get_device(), config_of(p)
    splits = splits_of(p, num_sms_of(gpu_of(device).num_sms))
    ctas = grid(p, splits)
    ready = KERNEL.run(config, lambda launcher: params_of(config, launcher, p, splits), ctas, device, ADDRESSES)
    places = (0, 0), (1, 0), (1, config.page * config.depth), *((tensor, 0) for tensor in range(2, 7))
    return logits_plan(ready, ctas, places, (16, 16, 4, 4, 4, 8), p.logits)


@cache
def paged_config(next_n: int, heads: int, depth: int, page: int, output_bytes: int) -> PagedConfig:
    """Configure the kernel for a problem."""
    return PagedConfig(next_n, heads, depth, page, output_bytes)


def config_of(p: PagedLogits) -> PagedConfig:
    """Configure the kernel for a problem."""
    _, next_n, heads, depth = p.q.shape
    return paged_config(next_n, heads, depth, p.cache.shape[1], p.logits.element_size())


def splits_of(p: PagedLogits, num_sms: int) -> int:
    """CTAs of a share: two if the schedule was made for half of the SMs."""
    return 2 if (p.schedule.shape[0] - 1) * 2 <= num_sms else 1


def grid(p: PagedLogits, splits: int) -> int:
    """Count CTAs: so many for each share."""
    return (p.schedule.shape[0] - 1) * splits


def reachable_paged() -> list[PagedConfig]:
    """Every configuration that `config_of` can give."""
    return [
        paged_config(next_n, heads, depth, page, output_bytes)
        for next_n in range(1, MAX_NEXT_N + 1)
        for heads in HEADS
        if next_n * heads <= MAX_COLUMNS
        for depth in DEPTHS
        for page in PAGES
        for output_bytes in (4, 2)
    ]


def usual_paged() -> list[PagedConfig]:
    """Give the configurations of models that exist."""
    return [
        config
        for config in reachable_paged()
        if config.heads in USUAL_HEADS and config.depth == USUAL_DEPTH and config.page == 64
    ]


def params_of(config: PagedConfig, launcher: driver.Launcher, p: PagedLogits, splits: int) -> bytes:
    """Give the kernel's parameters."""
    q_at, cache_at, block_bytes = p.q.data_ptr(), p.cache.data_ptr(), block_stride(p.cache)
    sequences, cache_blocks, depth, page = p.q.shape[0], p.cache.shape[0], config.depth, config.page
    columns = sequences * config.next_n * config.heads
    q = TensorMap(ElementType.UINT8, (depth, columns), (depth,), (depth, config.columns), depth)
    keys = TensorMap(ElementType.UINT8, (depth, page, cache_blocks), (depth, block_bytes), (depth, page, 1), depth)
    scales = TensorMap(ElementType.FLOAT32, (page, cache_blocks), (block_bytes,), (page, 1))
    per_token = p.contexts.dim() == 2
    return PARAMS.pack(
        {
            "map_q": launcher.encode(q, q_at, q_at),
            "map_keys": launcher.encode(keys, cache_at, cache_at),
            "map_scales": launcher.encode(scales, cache_at + page * depth, cache_at),
            "weights": p.weights.data_ptr(),
            "contexts": p.contexts.data_ptr(),
            "table": p.table.data_ptr(),
            "schedule": p.schedule.data_ptr(),
            "logits": p.logits.data_ptr(),
            "weights_pitch": p.weights.stride(0),
            "table_pitch": p.table.stride(0),
            "logits_pitch": p.logits.stride(0) * p.logits.element_size(),
            "sequences": sequences,
            "cache_blocks": cache_blocks,
            "contexts_pitch": config.next_n if per_token else 1,
            "contexts_step": 1 if per_token else 0,
            "most_keys": min(p.logits.shape[1], p.table.shape[1] * page),
            "splits": splits,
        }
    )


def code_plan(config: PagedConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of. It writes logits by ordinary stores."""
    math_threads = WARPGROUP_THREADS * config.num_math_warpgroups
    return CodePlan(
        roles=((WARPGROUP_THREADS, config.producer_registers), (math_threads, config.math_registers)),
        shared_bytes=config.shared_bytes,
        qgmma=config.products,
        tma_loads=config.units + 4,  # q of each unit; keys and scales, ahead of weights and behind
        multicast_loads=0,
    )


KERNEL: Kernel[PagedConfig] = Kernel(
    "fp8_paged_mqa_logits",
    PARAMS,
    reachable_paged,
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.columns])},
)
