"""The kernel of fp8_paged_mqa_logits.cuh: how it is compiled for a configuration, and launched for the indexer."""

from __future__ import annotations

import struct
from functools import lru_cache

from ..core.code_plan import CodePlan
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import Kernel
from ..core.params import Field, Kind, Params
from ..core.settings import num_sms_of
from ..core.sm90 import WARPGROUP_THREADS
from ..core.wgmma_header import wgmma_header
from .paged_check import PagedLogits, block_stride
from .paged_config import DEPTHS, HEADS, MAX_COLUMNS, MAX_NEXT_N, PAGES, PagedConfig, paged_config

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
MAX_MAPS = 1024
USUAL_HEADS, USUAL_DEPTH = (32, 64), 128
_NUMBERS = struct.Struct("<" + "".join(field.kind.format for field in PARAMS.fields))
"""All members behind the maps, which have no letter: packed at once, without names."""


def run(p: PagedLogits) -> None:
    """Compute the logits on the GPU that the operands are on."""
    device = p.q.get_device()
    config = config_of(p)
    splits = splits_of(p, num_sms_of(gpu_of(device).num_sms))
    KERNEL.run(config, lambda launcher: params_of(config, launcher, p, splits), grid(p, splits), device)


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
    cache_at = p.cache.data_ptr()
    contexts, sequences, cache_blocks = p.contexts, p.q.shape[0], p.cache.shape[0]
    maps = _maps(config, launcher, sequences, cache_blocks, block_stride(p.cache), p.q.data_ptr(), cache_at)
    per_token = contexts.dim() == 2
    return maps + _NUMBERS.pack(
        p.weights.data_ptr(),
        contexts.data_ptr(),
        p.table.data_ptr(),
        p.schedule.data_ptr(),
        p.logits.data_ptr(),
        p.weights.stride(0),
        p.table.stride(0),
        p.logits.stride(0) * p.logits.element_size(),
        sequences,
        cache_blocks,
        config.next_n if per_token else 1,
        1 if per_token else 0,
        min(p.logits.shape[1], p.table.shape[1] * config.page),
        splits,
    )


@lru_cache(MAX_MAPS)
def _maps(
    config: PagedConfig,
    launcher: driver.Launcher,
    sequences: int,
    cache_blocks: int,
    block_bytes: int,
    q_at: int,
    cache_at: int,
) -> bytes:
    """Encode the maps. Allocators give the same addresses again and again."""
    depth, page = config.depth, config.page
    columns = sequences * config.next_n * config.heads
    scales_at = cache_at + page * depth
    q = TensorMap(ElementType.UINT8, (depth, columns), (depth,), (depth, config.columns), depth)
    keys = TensorMap(ElementType.UINT8, (depth, page, cache_blocks), (depth, block_bytes), (depth, page, 1), depth)
    scales = TensorMap(ElementType.FLOAT32, (page, cache_blocks), (block_bytes,), (page, 1))
    return b"".join(
        (
            launcher.encode(q, q_at, q_at),
            launcher.encode(keys, cache_at, cache_at),
            launcher.encode(scales, scales_at, cache_at),
        )
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
