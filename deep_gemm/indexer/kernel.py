"""The kernel of indexer/fp8_mqa_logits.cuh: the indexer's logits of many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..core.call import CallPlan
from ..core.check.layout import align, ceil_div
from ..core.code_plan import CodePlan
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import Config, Kernel, Prepared
from ..core.params import Field, Kind, Params
from ..core.settings import num_sms_of
from ..core.sm90 import REGISTERS_PER_SM, SHARED_BYTES_LIMIT, WARPGROUP_THREADS, WGMMA_K
from ..core.wgmma_header import wgmma_header
from .check import DEPTHS, HEADS, MqaLogits

UNIT_COLUMNS = 128
"""Most columns of a unit, tokens x heads: one WGMMA. With more, the accumulators of two units would not fit."""
UNITS = 2
"""Units of a tile: one is reduced while the tensor cores work on the other."""
TILE_SLOTS = 2
MAX_STAGES = 8
RUN_BLOCKS = 4
"""Blocks of keys that are worked on in a straight line, one's products beside the other's sums."""
FILL_KEYS = 256
"""Keys of a piece of a row that is filled. Rows have room for as many more than the caller sees."""
FILL_WARPS = 3
PRODUCER_REGISTERS = 40
OTHER_REGISTERS = 40
"""A math thread's registers besides accumulators and weights: addresses, counters, sums."""
PARAMS = Params(
    "MqaParams",
    Field("map_q", Kind.MAP),
    Field("map_keys", Kind.MAP),
    Field("map_scales", Kind.MAP),
    Field("weights", Kind.POINTER),
    Field("starts", Kind.POINTER),
    Field("ends", Kind.POINTER),
    Field("logits", Kind.POINTER),
    Field("weights_pitch", Kind.UINT64),
    Field("logits_pitch", Kind.UINT64),
    Field("tokens", Kind.UINT32),
    Field("keys", Kind.UINT32),
    Field("row_keys", Kind.UINT32),
)
"""`MqaParams` of indexer/logits/mqa_params.cuh."""
ADDRESSES = ("map_q", "map_keys", "map_scales", "weights", "starts", "ends", "logits")
USUAL_HEADS, USUAL_DEPTH = (32, 64), 128


@dataclass(frozen=True)
class MqaConfig(Config):
    """One configuration."""

    heads: int
    depth: int
    """Bytes of a key."""
    output_bytes: int
    """4: logits in FP32; 2: in BF16."""
    is_compressed: bool
    """A row begins with its token's first key."""
    is_clean: bool
    """Logits outside of a token's range become -inf."""
    num_math_warpgroups: int = 2

    @property
    def name(self) -> str:
        """Short, for people; such as "64x128 fp32 clean"."""
        form = " compressed" * self.is_compressed + " clean" * self.is_clean
        return f"{self.heads}x{self.depth} {'fp32' if self.output_bytes == 4 else 'bf16'}{form}"

    @property
    def unit_tokens(self) -> int:
        """Tokens of a unit."""
        return UNIT_COLUMNS // self.heads

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile."""
        return UNITS * self.unit_tokens

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
        """Threads of a CTA: math warpgroups, and one for the producer's warp and those that fill."""
        return (self.num_math_warpgroups + 1) * WARPGROUP_THREADS

    @property
    def math_registers(self) -> int:
        """Registers of a math thread: what the others leave, in eights."""
        threads = self.num_math_warpgroups * WARPGROUP_THREADS
        at_launch = REGISTERS_PER_SM // self.num_threads // 8 * 8 * self.num_threads
        return min((at_launch - PRODUCER_REGISTERS * WARPGROUP_THREADS) // threads // 8 * 8, 248)

    @property
    def num_stages(self) -> int:
        """Blocks of keys in shared memory: as many as fit."""
        slot = self.block_keys * (self.depth + 4) + 16
        return min((SHARED_BYTES_LIMIT - self._fixed_bytes - 2048) // slot, MAX_STAGES)

    @property
    def _laid_weights(self) -> int:
        return TILE_SLOTS * UNITS * align(self.columns, 16) * 4

    @property
    def _fixed_bytes(self) -> int:
        q = align(TILE_SLOTS * UNITS * self.columns * self.depth, 1024)
        return q + self._laid_weights + TILE_SLOTS * (self.tile_tokens * 16 + 8 + 16) + 8 * self.num_threads // 32 + 16

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in indexer/fp8_mqa_logits.cuh, which asserts that it is the same."""
        q = align(TILE_SLOTS * UNITS * self.columns * self.depth, 1024)
        keys = self.num_stages * self.block_keys * self.depth
        at = q + align(keys, 128) + self.num_stages * self.block_keys * 4
        at += self._laid_weights + TILE_SLOTS * (self.tile_tokens * 16 + 8)
        at += self.num_stages * 16 + TILE_SLOTS * 16 + 8 * (self.num_threads // 32) + 16
        return align(at, 1024)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.heads in HEADS, f"a multiple of 8 heads up to {HEADS[-1]}"
        yield self.depth in DEPTHS, f"a depth of {DEPTHS}"
        yield self.output_bytes in (2, 4), "logits in FP32 or BF16"
        yield not (self.is_compressed and self.is_clean), "rows that are compressed or clean, not both"
        yield self.num_math_warpgroups in (2, 3), "2 or 3 math warpgroups"
        weights = UNITS * align(self.columns, 16) // 4  # a thread's, in registers
        registers = UNITS * self.columns // 2 + weights + OTHER_REGISTERS
        yield registers <= self.math_registers, f"{registers} of {self.math_registers} registers"
        yield self.num_stages >= 3, "at least 3 stages"
        yield self.shared_bytes <= SHARED_BYTES_LIMIT, f"{self.shared_bytes} of {SHARED_BYTES_LIMIT} bytes shared"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes."""
        return {
            "kHeads": self.heads,
            "kDepth": self.depth,
            "kOutputBytes": self.output_bytes,
            "kUnits": UNITS,
            "kUnitTokens": self.unit_tokens,
            "kBlockKeys": self.block_keys,
            "kRunBlocks": RUN_BLOCKS,
            "kFillKeys": FILL_KEYS,
            "kFillWarps": FILL_WARPS,
            "kNumStages": self.num_stages,
            "kMulticastCtas": 1,
            "kNumMathWarpgroups": self.num_math_warpgroups,
            "kNumMathWarps": self.num_math_warpgroups * 4,
            "kNumThreads": self.num_threads,
            "kProducerRegisters": PRODUCER_REGISTERS,
            "kMathRegisters": self.math_registers,
            "kSharedBytes": self.shared_bytes,
            "kIsCompressed": self.is_compressed,
            "kIsClean": self.is_clean,
        }

    @property
    def products(self) -> int:
        """WGMMA instructions of the loop over runs, and of that over the blocks that are left."""
        return UNITS * self.depth // WGMMA_K * (RUN_BLOCKS + 1)


def run(p: MqaLogits) -> CallPlan | None:
    """Compute the logits on the GPU that the operands are on, and give the plan, which serves other calls."""
    device, config = p.q.get_device(), config_of(p)
    ctas = grid(config, p.q.shape[0], p.keys.shape[0], num_sms_of(gpu_of(device).num_sms))
    ready = KERNEL.run(config, lambda launcher: params_of(config, launcher, p), ctas, device, ADDRESSES)
    return logits_plan(ready, ctas, [(tensor, 0) for tensor in range(7)], (16, 16, 16, 4, 4, 4), p.logits)


def logits_plan(
    ready: Prepared[Any] | None, ctas: int, places: Sequence[tuple[int, int]], alignments: Sequence[int], like: Tensor
) -> CallPlan | None:
    """Give the plan of calls that make logits like these, if their launch is prepared."""
    if ready is None:
        return None
    (rows, columns), pitch, dtype, device = like.shape, like.stride(0), like.dtype, like.device

    def new_outputs() -> tuple[Tensor]:
        return (torch.empty((rows, pitch), dtype=dtype, device=device).as_strided((rows, columns), (pitch, 1)),)

    return CallPlan(ready.launch, ctas, places, alignments, new_outputs=new_outputs)


@cache
def mqa_config(heads: int, depth: int, output_bytes: int, is_compressed: bool, is_clean: bool) -> MqaConfig:
    """Configure the kernel for a problem."""
    return MqaConfig(heads, depth, output_bytes, is_compressed, is_clean)


def config_of(p: MqaLogits) -> MqaConfig:
    """Configure the kernel for a problem."""
    _, heads, depth = p.q.shape
    return mqa_config(heads, depth, p.logits.element_size(), p.is_compressed, p.clean_logits)


def reachable_mqa() -> list[MqaConfig]:
    """Every configuration that `config_of` can give."""
    forms = ((False, False), (False, True), (True, False))
    return [
        mqa_config(heads, depth, output_bytes, *form)
        for heads in HEADS
        for depth in DEPTHS
        for output_bytes in (4, 2)
        for form in forms
    ]


def usual_mqa() -> list[MqaConfig]:
    """Give the configurations of models that exist."""
    return [config for config in reachable_mqa() if config.heads in USUAL_HEADS and config.depth == USUAL_DEPTH]


def params_of(config: MqaConfig, launcher: driver.Launcher, p: MqaLogits) -> bytes:
    """Give the kernel's parameters."""
    q_at, keys_at, scales_at = p.q.data_ptr(), p.keys.data_ptr(), p.scales.data_ptr()
    tokens, keys, depth = p.q.shape[0], p.keys.shape[0], config.depth
    q = TensorMap(ElementType.UINT8, (depth, tokens * config.heads), (depth,), (depth, config.columns), depth)
    of_keys = TensorMap(ElementType.UINT8, (depth, keys), (depth,), (depth, config.block_keys), depth)
    scales = TensorMap(ElementType.FLOAT32, (keys, 1), (align(keys * 4, 16),), (config.block_keys, 1))
    return PARAMS.pack(
        {
            "map_q": launcher.encode(q, q_at, q_at),
            "map_keys": launcher.encode(of_keys, keys_at, keys_at),
            "map_scales": launcher.encode(scales, scales_at, scales_at),
            "weights": p.weights.data_ptr(),
            "starts": p.starts.data_ptr(),
            "ends": p.ends.data_ptr(),
            "logits": p.logits.data_ptr(),
            "weights_pitch": p.weights.stride(0),
            "logits_pitch": p.logits.stride(0) * p.logits.element_size(),
            "tokens": tokens,
            "keys": keys,
            "row_keys": p.logits.shape[1],
        }
    )


def code_plan(config: MqaConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of. It writes logits by ordinary stores."""
    math_threads = WARPGROUP_THREADS * config.num_math_warpgroups
    return CodePlan(
        roles=((WARPGROUP_THREADS, PRODUCER_REGISTERS), (math_threads, config.math_registers)),
        shared_bytes=config.shared_bytes,
        qgmma=config.products,
        tma_loads=UNITS + 4,  # q of each unit; keys and scales, with waiting and without
        multicast_loads=0,
    )


def grid(config: MqaConfig, tokens: int, keys: int, num_sms: int) -> int:
    """A CTA on each SM, or as many as there can be blocks."""
    return min(num_sms, ceil_div(tokens, config.tile_tokens) * ceil_div(keys + FILL_KEYS, config.block_keys))


KERNEL: Kernel[MqaConfig] = Kernel(
    "fp8_mqa_logits",
    PARAMS,
    reachable_mqa,
    code=code_plan,
    more=lambda config: {"wgmma_shapes.cuh": wgmma_header([config.columns])},
)
