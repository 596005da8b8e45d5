"""The kernel of moe/experts_few.cuh: both products of a layer of experts, for few tokens and BF16 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..casts.cast_rows import gating_values
from ..casts.gating import Gating
from ..core.check.layout import ADDRESS_ALIGNMENT
from ..core.check.memory import empty
from ..core.gpu import gpu_of
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import CodePlan, Config, Kernel
from ..core.settings import num_sms_of
from ..core.shadow import Mapped
from ..core.wgmma_header import wgmma_bf16_header
from ..gemm.config.bf16 import BLOCK_K
from ..gemm.maps import operand_map
from .check import ExpertsProblem
from .routing import MAX_PITCH, on_hopper, with_contiguous_rows

COLUMNS = (8, 16)
"""Tokens of each configuration, at most."""


@dataclass(frozen=True)
class FewConfig(Config):
    """One configuration. Two CTAs share an SM, one of each product."""

    columns: int
    """Tokens, at most."""
    is_second: bool
    """It multiplies activations, not tokens."""
    max_experts: ClassVar[int] = 512
    prefetched_units: ClassVar[int] = 112
    """The most blocks of 16 x 64 that a CTA of the second product loads ahead: all or none. 30 MB on 132 SMs."""
    early_blocks: ClassVar[int] = 8
    """k-blocks that a CTA of the first product has still to load when it lets the second start."""
    num_threads: ClassVar[int] = 320
    ctas_per_sm: ClassVar[int] = 2
    ring_bytes: ClassVar[int] = 108 << 10
    shared_bytes: ClassVar[int] = 113 << 10
    taken = (
        *("columns", "is_second", "max_experts", "prefetched_units", "early_blocks"),
        *("num_threads", "ctas_per_sm", "ring_bytes", "shared_bytes"),
    )

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.columns} tokens, product {1 + self.is_second}"


KERNEL: Kernel[FewConfig] = Kernel(
    "experts_few",
    "ExpertsFewParams",
    lambda: [FewConfig(columns, is_second) for columns in COLUMNS for is_second in (False, True)],
    name="bf16_gemm_experts_few",
    code=lambda config: CodePlan(
        ((config.num_threads, None),), config.shared_bytes, tma_loads=2, hgmma=4, ctas_per_sm=config.ctas_per_sm
    ),
    more=lambda config: {"wgmma_shapes.cuh": wgmma_bf16_header([config.columns])},
)


def serves(p: ExpertsProblem) -> bool:
    """Tell whether the kernel computes this: at most 16 tokens in BF16, whose rows begin where 16 bytes may."""
    (tokens, hidden), x = p.x.shape, p.x
    return (
        0 < tokens <= COLUMNS[-1]
        and p.topk_ids.shape[1] > 0
        and p.w1_bias is p.w2_bias is None
        and x.dtype == torch.bfloat16
        and on_hopper(x)
        and 0 < p.num_experts <= FewConfig.max_experts
        and hidden > 0
        and hidden % 16 == 0
        and all(scales is None and w.shape[2] > 0 and w.is_contiguous() for w, scales in (p.w1, p.w2))
        and x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and x.stride(1) == 1
        and (tokens == 1 or (x.stride(0) % 8 == 0 and hidden <= x.stride(0) < MAX_PITCH))
    )


def run(p: ExpertsProblem) -> tuple[Tensor, Tensor]:
    """Compute the rows of both products. Give the second product's rows, and the row of each route."""
    topk_ids, device = with_contiguous_rows(p.topk_ids), p.x.get_device()
    tokens, topk = topk_ids.shape
    inter, hidden = p.w2[0].shape[2], p.x.shape[1]
    row_of = empty("rows of routes", (tokens, topk), torch.int32, p.x.device)
    h = empty("activations", (tokens * topk, inter), torch.bfloat16, p.x.device)
    y = empty("a product", (tokens * topk, hidden), torch.bfloat16, p.x.device)
    columns = next(each for each in COLUMNS if tokens <= each)
    num_sms = num_sms_of(gpu_of(device).num_sms)
    first, second = FewConfig(columns, False), FewConfig(columns, True)
    KERNEL.run(first, values_of(first, p.x, topk_ids, row_of, p.w1[0], h, p.gating), num_sms, device)
    values = values_of(second, h, topk_ids, None, p.w2[0], y, p.gating)
    KERNEL.run(second, values, num_sms, device, is_dependent=True)
    return y, row_of


def values_of(
    config: FewConfig, b: Tensor, topk_ids: Tensor, row_of: Tensor | None, w: Tensor, d: Tensor, gating: Gating
) -> dict[str, Any]:
    """Give the members of the kernel's parameters."""
    (tokens, topk), (num_experts, rows, k), n = topk_ids.shape, w.shape, d.shape[1]
    return {
        "map_w": Mapped(weight_map(w, 1, is_second=config.is_second), w),
        "map_fours": Mapped(weight_map(w, 4, is_second=config.is_second), w),
        "map_b": Mapped(operand_map(b, tokens, BLOCK_K), b),
        "topk_ids": topk_ids,
        "row_of": row_of,
        "d": d,
        "tokens": tokens,
        "topk": topk,
        "ids_pitch": topk_ids.stride(0) if tokens > 1 else 0,
        "id_bytes": topk_ids.element_size(),
        "num_experts": num_experts,
        "n": n,
        "k": k,
        "units": rows // 16,
        "units_apart": rows // (16 if config.is_second else 8),
        **gating_values(gating),
    }


def weight_map(w: Tensor, units: int, *, is_second: bool) -> TensorMap:
    """Map the weights of all experts in boxes of `units`: each 8 rows of gate and the same of up, or 16 neighbours."""
    num_experts, rows, k = w.shape
    apart, step = (8, 16) if is_second else (rows // 2, 8)  # the second 8 rows of a unit, and the next unit
    strides = k * 2, apart * k * 2, step * k * 2
    count = (num_experts * rows - apart - 8) // step + 1
    return TensorMap(ElementType.BFLOAT16, (k, 8, 2, count), strides, (BLOCK_K, 8, 2, units), 128)
