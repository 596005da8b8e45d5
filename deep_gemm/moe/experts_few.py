"""The kernel of moe/experts_few.cuh: both products of experts, for few tokens and weights in BF16 or E4M3."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..casts.cast_rows import gating_values
from ..casts.config import pitch
from ..casts.gating import Gating
from ..casts.rules import Rows
from ..core.check.layout import ADDRESS_ALIGNMENT
from ..core.check.memory import empty
from ..core.check.recipes import E4M3, PER_BLOCK, PER_ROW, WHOLE, Scales
from ..core.gpu import gpu_of
from ..core.jit.tensor_map import TensorMap
from ..core.kernel import CodePlan, Config, Kernel
from ..core.settings import num_sms_of
from ..core.shadow import Mapped, least
from ..core.wgmma_header import wgmma_bf16_header, wgmma_header
from ..gemm.kinds.output import Operands
from ..gemm.maps import element_of, operand_map
from .check import ExpertsProblem
from .routing import MAX_PITCH, on_hopper, with_contiguous_rows

MOST_TOKENS = 8
"""Columns of WGMMA. With more tokens the six launches of the usual path are as fast (H200, 2026-11-29)."""
MOST_BYTES = 750_000_000
"""The most bytes of E4M3 weights, if each route names another expert. With more, six launches take less time."""
SCALES: dict[Operands, Scales] = {(E4M3, PER_ROW, PER_BLOCK): PER_BLOCK, (E4M3, WHOLE, WHOLE): WHOLE}
"""The scales of weights that the kernel supports, by the types and scales of the operands."""
LINE_BYTES = 128
"""Bytes of a weight's row in a k-block: 64 BF16 columns or 128 of E4M3. A warp casts 128 columns of B at a time."""


@dataclass(frozen=True)
class FewConfig(Config):
    """One configuration. An SM runs two CTAs at a time, one of each product."""

    is_second: bool
    """True: the kernel multiplies activations; False: tokens."""
    scales: Scales | None = None
    """Scales of E4M3 weights. Weights in BF16 have none."""
    columns: ClassVar[int] = MOST_TOKENS
    max_experts: ClassVar[int] = 512
    early_blocks: ClassVar[int] = 8
    """k-blocks that a CTA of the first product has not loaded yet when it lets the second product start."""
    ctas_per_sm: ClassVar[int] = 2
    ring_bytes: ClassVar[int] = 108 << 10
    shared_bytes: ClassVar[int] = 113 << 10
    taken = (
        *("columns", "is_second", "max_experts", "early_blocks"),
        *("num_threads", "ctas_per_sm", "ring_bytes", "shared_bytes"),
    )

    @property
    def name(self) -> str:
        """Return a short name for people."""
        of_weights = "" if self.scales is None else f" e4m3 by {'rows' if self.scales == WHOLE else 'blocks'}"
        return f"product {1 + self.is_second}{of_weights}"

    @property
    def kernel_name(self) -> str:
        """Return the kernel's name, which tells the type of weights."""
        return f"{'bf16' if self.scales is None else 'fp8'}_gemm_experts_few"

    @property
    def num_threads(self) -> int:
        """Count the threads: 8 math warps, one warp that loads weights, and one that loads B or four that cast it."""
        return 320 if self.scales is None else 416

    def constants(self) -> dict[str, int | bool]:
        """Return the source's constants; B is cast from BF16 (tokens) or from FP32 (activations)."""
        input_bytes = 4 if self.is_second else 2
        return {
            **super().constants(),
            "kIsFp8": self.scales is not None,
            "kIsByRow": self.scales == WHOLE,
            "kBlock": LINE_BYTES,
            "kVector": LINE_BYTES // 32,
            "kInputBytes": input_bytes,
            "kInputIsFp32": self.is_second,
            "kInputIsFp16": False,
            "kMarksBlocks": False,
            "kActivates": False,
        }

    def choices(self) -> dict[str, str]:
        """Define the macro KERNEL_NAME of the source."""
        return {"KERNEL_NAME": self.kernel_name}


KERNEL: Kernel[FewConfig] = Kernel(
    "experts_few",
    "ExpertsFewParams",
    lambda: [FewConfig(*each) for each in product((False, True), (None, *SCALES.values()))],
    name="bf16_gemm_experts_few",
    code=lambda config: CodePlan(
        ((config.num_threads, None),),
        config.shared_bytes,
        qgmma=0 if config.scales is None else 4,
        tma_loads=2 if config.scales is None else 1,  # a B that is cast is not loaded by TMA
        hgmma=4 if config.scales is None else 0,
        ctas_per_sm=config.ctas_per_sm,
    ),
    more=lambda config: {
        "wgmma_shapes.cuh": (wgmma_bf16_header if config.scales is None else wgmma_header)([config.columns])
    },
)


def serves(p: ExpertsProblem) -> bool:
    """Tell whether the kernel serves this problem: few BF16 tokens, with rows at multiples of 16 bytes.

    Weights are BF16, or E4M3 with scales of 128x128 or of whole rows and at most MOST_BYTES in use.
    """
    (tokens, hidden), x = p.x.shape, p.x
    bytes_of_expert = sum(w.shape[1] * w.shape[2] for w, sf in (p.w1, p.w2) if sf is not None)
    of_both = (p.w1, SCALES.get(p.first)), (p.w2, SCALES.get(p.second))
    return (
        0 < tokens <= MOST_TOKENS
        and p.topk_ids.shape[1] > 0
        and least(tokens * p.topk_ids.shape[1], p.num_experts) * bytes_of_expert <= MOST_BYTES
        and p.w1_bias is p.w2_bias is None
        and x.dtype == torch.bfloat16
        and on_hopper(x)
        and 0 < p.num_experts <= FewConfig.max_experts
        and hidden > 0
        and hidden % 16 == 0
        and all(w.shape[2] > 0 and w.is_contiguous() for w, _ in (p.w1, p.w2))
        and all(sf is None or (kind is not None and sf.dtype == torch.float32) for (_, sf), kind in of_both)
        and x.data_ptr() % ADDRESS_ALIGNMENT == 0
        and x.stride(1) == 1
        and (tokens == 1 or (x.stride(0) % 8 == 0 and hidden <= x.stride(0) < MAX_PITCH))
    )


def run(p: ExpertsProblem, first_expert: int = 0) -> tuple[Tensor, Tensor]:
    """Compute both products. Return the second one's rows, and each route's row; expert 0 has id `first_expert`."""
    topk_ids, device = with_contiguous_rows(p.topk_ids), p.x.get_device()
    tokens, topk = topk_ids.shape
    inter, hidden = p.w2[0].shape[2], p.x.shape[1]
    row_of = empty("rows of routes", (tokens, topk), torch.int32, p.x.device)
    h_type = torch.bfloat16 if p.w2[1] is None else torch.float32  # the second product casts it
    h = empty("activations", (tokens * topk, inter), h_type, p.x.device)
    y = empty("a product", (tokens * topk, hidden), torch.bfloat16, p.x.device)
    num_sms = num_sms_of(gpu_of(device).num_sms)
    first, second = FewConfig(False, SCALES.get(p.first)), FewConfig(True, SCALES.get(p.second))
    KERNEL.run(first, values_of(first, p.x, topk_ids, row_of, p.w1, h, p.gating, first_expert), num_sms, device)
    values = values_of(second, h, topk_ids, None, p.w2, y, p.gating, first_expert)
    KERNEL.run(second, values, num_sms, device, is_dependent=True)
    return y, row_of


def values_of(
    config: FewConfig,
    b: Tensor,
    topk_ids: Tensor,
    row_of: Tensor | None,
    w: Rows,
    d: Tensor,
    gating: Gating,
    first_expert: int,
) -> dict[str, Any]:
    """Return the members of the kernel's parameters."""
    weights, scales = w
    (tokens, topk), (num_experts, rows, k), n = topk_ids.shape, weights.shape, d.shape[1]
    map_w = Mapped(weight_map(weights, 1, is_second=config.is_second), weights)
    stride_e, stride_n, stride_k = (0, 0, 0) if scales is None else scales.stride()
    return {
        "map_w": map_w,
        "map_fours": Mapped(weight_map(weights, 4, is_second=config.is_second), weights),
        "map_b": Mapped(operand_map(b, tokens, LINE_BYTES // 2), b) if scales is None else map_w,  # FP8: unused
        "b": b,
        "sfw": scales,
        "topk_ids": topk_ids,
        "row_of": row_of,
        "d": d,
        "tokens": tokens,
        "topk": topk,
        "ids_pitch": topk_ids.stride(0) if tokens > 1 else 0,
        "id_bytes": topk_ids.element_size(),
        "num_experts": num_experts,
        "first_expert": first_expert,
        "n": n,
        "k": k,
        "units": rows // 16,
        "units_apart": rows // (16 if config.is_second else 8),
        "b_pitch": pitch(b, 0) if b.shape[0] > 1 else 0,
        "sfw_stride_e": stride_e,
        "sfw_stride_n": stride_n,
        "sfw_stride_k": stride_k,
        **gating_values(gating),
    }


def weight_map(w: Tensor, units: int, *, is_second: bool) -> TensorMap:
    """Map all weights in boxes of `units`; each unit is 8 rows of gate and the same 8 of up, or 16 neighbours."""
    num_experts, rows, k = w.shape
    apart, step = (8, 16) if is_second else (rows // 2, 8)  # strides to a unit's second 8 rows, and to the next unit
    strides = tuple(rows * k * w.element_size() for rows in (1, apart, step))
    count = (num_experts * rows - apart - 8) // step + 1
    box = LINE_BYTES // w.element_size(), 8, 2, units
    return TensorMap(element_of(w), (k, 8, 2, count), strides, box, LINE_BYTES)
