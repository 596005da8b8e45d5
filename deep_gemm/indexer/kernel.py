"""The kernels of indexer/fp8_mqa_logits.cuh and indexer/fp8_paged_mqa_logits.cuh, and their launches."""

from __future__ import annotations

from typing import Any

from ..core.check.layout import align, ceil_div
from ..core.gpu import gpu_of
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import Kernel
from ..core.settings import num_sms_of
from ..core.shadow import Mapped, least
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


def _more(config: LogitsConfig) -> dict[str, str]:
    return {"wgmma_shapes.cuh": wgmma_header([config.columns])}


IN_ROWS = Kernel("fp8_mqa_logits", "MqaParams", reachable_rows, code=code_plan, more=_more)
IN_PAGES = Kernel("fp8_paged_mqa_logits", "PagedParams", reachable_pages, code=code_plan, more=_more)


def kernel_of(p: Logits) -> Kernel[LogitsConfig]:
    """Return the kernel of a problem."""
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


def run(p: Logits) -> None:
    """Compute the logits on the GPU of the operands."""
    device, config = p.q.get_device(), config_of(p)
    ctas = grid(config, p, num_sms_of(gpu_of(device).num_sms))
    kernel_of(p).run(config, values_of(config, p, ctas), ctas, device)


def grid(config: LogitsConfig, p: Logits, num_sms: int) -> Any:
    """Count the CTAs: one on each SM, or one for each possible block if these are fewer; for pages, one for each share.

    A share has two CTAs if the schedule was made for at most half of the SMs.
    """
    if isinstance(p, PagedLogits):
        shares = p.schedule.shape[0] - 1
        return shares * 2 if shares * 2 <= num_sms else shares
    blocks = ceil_div(p.keys.shape[0] + FILL_KEYS, BLOCK_KEYS)
    return least(num_sms, ceil_div(p.q.shape[0], config.tile_tokens) * blocks)


def values_of(config: LogitsConfig, p: Logits, ctas: Any) -> dict[str, Any]:
    """Return the kernel's parameters by member."""
    depth = config.depth
    q = TensorMap(ElementType.UINT8, (depth, p.q.numel() // depth), (depth,), (depth, config.columns), depth)
    return {
        "map_q": Mapped(q, p.q),
        "weights": p.weights,
        "logits": p.logits,
        "weights_pitch": p.weights.stride(0),
        "logits_pitch": p.logits.stride(0) * p.logits.element_size(),
        **(_in_pages(config, p, ctas) if isinstance(p, PagedLogits) else _in_rows(config, p)),
    }


def _in_rows(config: LogitsConfig, p: MqaLogits) -> dict[str, Any]:
    keys, depth = p.keys.shape[0], config.depth
    of_keys = TensorMap(ElementType.UINT8, (depth, keys), (depth,), (depth, BLOCK_KEYS), depth)
    scales = TensorMap(ElementType.FLOAT32, (keys, 1), (align(keys * 4, 16),), (BLOCK_KEYS, 1))
    return {
        "map_keys": Mapped(of_keys, p.keys),
        "map_scales": Mapped(scales, p.scales),
        "starts": p.starts,
        "ends": p.ends,
        "tokens": p.q.shape[0],
        "keys": keys,
        "row_keys": p.logits.shape[1],
    }


def _in_pages(config: LogitsConfig, p: PagedLogits, ctas: int) -> dict[str, Any]:
    block_bytes, depth = block_stride(p.cache), config.depth
    blocks, page = p.cache.shape[:2]
    keys = TensorMap(ElementType.UINT8, (depth, page, blocks), (depth, block_bytes), (depth, page, 1), depth)
    scales = TensorMap(ElementType.FLOAT32, (page, blocks), (block_bytes,), (page, 1))
    per_token = p.contexts.dim() == 2
    return {
        "map_keys": Mapped(keys, p.cache),
        "map_scales": Mapped(scales, p.cache, -page * depth),
        "contexts": p.contexts,
        "table": p.table,
        "schedule": p.schedule,
        "table_pitch": p.table.stride(0),
        "sequences": p.q.shape[0],
        "cache_blocks": blocks,
        "contexts_pitch": p.q.shape[1] if per_token else 1,
        "contexts_step": 1 if per_token else 0,
        "most_keys": min(p.logits.shape[1], p.table.shape[1] * page),
        "splits": ctas // (p.schedule.shape[0] - 1),
    }
