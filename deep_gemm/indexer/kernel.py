"""The kernels of indexer/fp8_mqa_logits.cuh and indexer/fp8_paged_mqa_logits.cuh: launches of the indexer's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.call import CallPlan
from ..core.check.layout import align, ceil_div
from ..core.gpu import gpu_of
from ..core.jit import driver
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import Kernel
from ..core.settings import num_sms_of
from ..core.wgmma_header import wgmma_header
from .check import Logits, MqaLogits, PagedLogits, block_stride
from .config import (
    BLOCK_KEYS,
    FILL_KEYS,
    InPages,
    InRows,
    LogitsConfig,
    code_plan,
    logits_config,
    reachable_pages,
    reachable_rows,
)

MAPS = "map_q", "map_keys", "map_scales"
ROW_POINTERS = "weights", "starts", "ends", "logits"
PAGE_POINTERS = "weights", "contexts", "table", "schedule", "logits"


def _more(config: LogitsConfig) -> dict[str, str]:
    return {"wgmma_shapes.cuh": wgmma_header([config.columns])}


IN_ROWS = Kernel("fp8_mqa_logits", "MqaParams", reachable_rows, code=code_plan, more=_more)
IN_PAGES = Kernel("fp8_paged_mqa_logits", "PagedParams", reachable_pages, code=code_plan, more=_more)


def kernel_of(p: Logits) -> Kernel[LogitsConfig]:
    """Give the kernel of a problem."""
    return IN_PAGES if isinstance(p, PagedLogits) else IN_ROWS


def config_of(p: Logits) -> LogitsConfig:
    """Configure the kernel for a problem."""
    heads, depth = p.q.shape[-2:]
    keys: InRows | InPages
    if isinstance(p, PagedLogits):
        keys = InPages(p.q.shape[1], p.cache.shape[1])
    else:
        keys = InRows(p.is_compressed, p.clean_logits)
    return logits_config(heads, depth, p.logits.element_size(), keys)


def run(p: Logits) -> CallPlan | None:
    """Compute the logits on the GPU that the operands are on, and give the plan, which serves other calls."""
    device, kernel, config = p.q.get_device(), kernel_of(p), config_of(p)
    ctas = grid(config, p, num_sms_of(gpu_of(device).num_sms))
    addresses = *MAPS, *(PAGE_POINTERS if isinstance(p, PagedLogits) else ROW_POINTERS)
    ready = kernel.run(config, lambda launcher: params_of(config, launcher, p, ctas), ctas, device, addresses)
    if ready is None:
        return None
    places = [(tensor, 0) for tensor in range(7)]
    alignments = 16, 16, 16, 4, 4, 4
    if isinstance(p, PagedLogits):
        places.insert(2, (1, p.cache.shape[1] * config.depth))  # scales lie behind the first page's keys
        alignments = 16, 16, 4, 4, 4, 8
    (rows, columns), pitch, dtype, at = p.logits.shape, p.logits.stride(0), p.logits.dtype, p.logits.device

    def new_outputs() -> tuple[Tensor]:
        return (torch.empty((rows, pitch), dtype=dtype, device=at).as_strided((rows, columns), (pitch, 1)),)

    return CallPlan(ready.launch, ctas, places, alignments, new_outputs=new_outputs)


def grid(config: LogitsConfig, p: Logits, num_sms: int) -> int:
    """Count CTAs: one on each SM, or as many as there can be blocks; of pages, as many as the schedule has shares.

    Each share has two CTAs if the schedule was made for half of the SMs.
    """
    if isinstance(p, PagedLogits):
        shares = p.schedule.shape[0] - 1
        return shares * 2 if shares * 2 <= num_sms else shares
    blocks = ceil_div(p.keys.shape[0] + FILL_KEYS, BLOCK_KEYS)
    return min(num_sms, ceil_div(p.q.shape[0], config.tile_tokens) * blocks)


def params_of(config: LogitsConfig, launcher: driver.Launcher, p: Logits, ctas: int) -> bytes:
    """Give the kernel's parameters."""
    q_at, depth = p.q.data_ptr(), config.depth
    rows_of_q = p.q.numel() // depth
    q = TensorMap(ElementType.UINT8, (depth, rows_of_q), (depth,), (depth, config.columns), depth)
    numbers: dict[str, float | bytes] = {
        "map_q": launcher.encode(q, q_at, q_at),
        "weights": p.weights.data_ptr(),
        "logits": p.logits.data_ptr(),
        "weights_pitch": p.weights.stride(0),
        "logits_pitch": p.logits.stride(0) * p.logits.element_size(),
    }
    if isinstance(p, PagedLogits):
        return IN_PAGES.params.pack({**numbers, **_in_pages(config, launcher, p, ctas)})
    return IN_ROWS.params.pack({**numbers, **_in_rows(config, launcher, p)})


def _in_rows(config: LogitsConfig, launcher: driver.Launcher, p: MqaLogits) -> dict[str, float | bytes]:
    keys_at, scales_at, keys, depth = p.keys.data_ptr(), p.scales.data_ptr(), p.keys.shape[0], config.depth
    of_keys = TensorMap(ElementType.UINT8, (depth, keys), (depth,), (depth, BLOCK_KEYS), depth)
    scales = TensorMap(ElementType.FLOAT32, (keys, 1), (align(keys * 4, 16),), (BLOCK_KEYS, 1))
    return {
        "map_keys": launcher.encode(of_keys, keys_at, keys_at),
        "map_scales": launcher.encode(scales, scales_at, scales_at),
        "starts": p.starts.data_ptr(),
        "ends": p.ends.data_ptr(),
        "tokens": p.q.shape[0],
        "keys": keys,
        "row_keys": p.logits.shape[1],
    }


def _in_pages(config: LogitsConfig, launcher: driver.Launcher, p: PagedLogits, ctas: int) -> dict[str, float | bytes]:
    cache_at, block_bytes, depth = p.cache.data_ptr(), block_stride(p.cache), config.depth
    blocks, page = p.cache.shape[:2]
    keys = TensorMap(ElementType.UINT8, (depth, page, blocks), (depth, block_bytes), (depth, page, 1), depth)
    scales = TensorMap(ElementType.FLOAT32, (page, blocks), (block_bytes,), (page, 1))
    per_token = p.contexts.dim() == 2
    return {
        "map_keys": launcher.encode(keys, cache_at, cache_at),
        "map_scales": launcher.encode(scales, cache_at + page * depth, cache_at),
        "contexts": p.contexts.data_ptr(),
        "table": p.table.data_ptr(),
        "schedule": p.schedule.data_ptr(),
        "table_pitch": p.table.stride(0),
        "sequences": p.q.shape[0],
        "cache_blocks": blocks,
        "contexts_pitch": p.q.shape[1] if per_token else 1,
        "contexts_step": 1 if per_token else 0,
        "most_keys": min(p.logits.shape[1], p.table.shape[1] * page),
        "splits": ctas // (p.schedule.shape[0] - 1),
    }
