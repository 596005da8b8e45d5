"""The kernel of moe/experts_few.cuh: both products of a layer of experts, for few tokens and BF16 weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..casts.cast_rows import gating_values
from ..casts.gating import Gating
from ..core.check.layout import ADDRESS_ALIGNMENT, align
from ..core.check.memory import empty
from ..core.gpu import SHARED_BYTES_LIMIT, gpu_of, is_hopper
from ..core.jit.tensor_map import ElementType, TensorMap
from ..core.kernel import CodePlan, Config, Kernel
from ..core.settings import num_sms_of
from ..core.shadow import Mapped
from ..core.wgmma_header import wgmma_bf16_header
from ..gemm.config.bf16 import BLOCK_K
from ..gemm.config.decode import RESERVED_SHARED_BYTES, SHARED_BYTES_PER_SM
from ..gemm.maps import operand_map
from .check import ExpertsProblem
from .routing import MAX_PITCH

COLUMNS = (8, 16)
"""Tokens of each configuration, at most."""
UNIT_ROWS = 16
"""Rows of a weight that are dealt to CTAs at a time."""


@dataclass(frozen=True)
class FewConfig(Config):
    """One configuration."""

    columns: int
    """Tokens, at most."""
    is_second: bool
    """It multiplies activations, not tokens."""
    num_threads: ClassVar[int] = 320
    ctas_per_sm: ClassVar[int] = 2
    """One of each product."""
    max_experts: ClassVar[int] = 512
    max_stages: ClassVar[int] = 16
    prefetched_units: ClassVar[int] = 112
    """Blocks of 64 values of k of units, at most, all of which a CTA of the second product asks for during the first.

    On 132 SMs that makes 30 MB, of which rings have room for 13; the L2 has 50.
    """
    taken = (
        *("columns", "is_second", "num_threads", "ctas_per_sm", "ring_bytes", "shared_bytes"),
        *("max_experts", "max_stages", "prefetched_units"),
    )

    @property
    def name(self) -> str:
        """Short, for people."""
        return f"{self.columns} tokens, product {1 + self.is_second}"

    @property
    def other_bytes(self) -> int:
        """Shared memory besides the ring: tables of experts, sums of warps, barriers."""
        return self.max_experts * 8 + 8 * 4 + self.max_stages * 16

    @property
    def ring_bytes(self) -> int:
        """Bytes of the ring: all that is left."""
        limit = min(SHARED_BYTES_PER_SM // self.ctas_per_sm - RESERVED_SHARED_BYTES, SHARED_BYTES_LIMIT)
        return (limit - self.other_bytes) // 1024 * 1024

    @property
    def shared_bytes(self) -> int:
        """Size of `SharedStorage` in moe/experts_few.cuh, which asserts that it is the same."""
        return align(self.ring_bytes + self.other_bytes, 1024)

    def rules(self) -> Iterator[tuple[bool, str]]:
        """State what must hold for the kernel to be built so."""
        yield self.columns in COLUMNS, f"a number of tokens among {COLUMNS}"


config_of = cache(FewConfig)


def code_plan(config: FewConfig) -> CodePlan:
    """Derive what the kernel's machine code must consist of."""
    return CodePlan(
        roles=((config.num_threads, None),),
        shared_bytes=config.shared_bytes,
        qgmma=0,
        tma_loads=2,  # weights and B
        multicast_loads=0,
        hgmma=4,
        ctas_per_sm=config.ctas_per_sm,
    )


KERNEL: Kernel[FewConfig] = Kernel(
    "experts_few",
    "ExpertsFewParams",
    lambda: [config_of(columns, is_second) for columns in COLUMNS for is_second in (False, True)],
    name="bf16_gemm_experts_few",
    code=code_plan,
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
        and x.is_cuda
        and is_hopper(x.get_device())
        and 0 < p.num_experts <= FewConfig.max_experts
        and hidden > 0
        and hidden % UNIT_ROWS == 0
        and all(scales is None and w.shape[2] > 0 and w.is_contiguous() for w, scales in (p.w1, p.w2))
        and x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and x.stride(1) == 1
        and (tokens == 1 or (x.stride(0) % 8 == 0 and hidden <= x.stride(0) < MAX_PITCH))
    )


def run(p: ExpertsProblem, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the rows of both products. Give the second product's rows, and the row of each route.

    `topk_ids` are the problem's, in contiguous rows.
    """
    (tokens, topk), device = topk_ids.shape, p.x.get_device()
    inter, hidden = p.w2[0].shape[2], p.x.shape[1]
    row_of = empty("rows of routes", (tokens, topk), torch.int32, p.x.device)
    h = empty("activations", (tokens * topk, inter), torch.bfloat16, p.x.device)
    y = empty("a product", (tokens * topk, hidden), torch.bfloat16, p.x.device)
    columns = next(each for each in COLUMNS if tokens <= each)
    num_sms = num_sms_of(gpu_of(device).num_sms)
    first, second = config_of(columns, False), config_of(columns, True)
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
        "units": rows // UNIT_ROWS,
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
