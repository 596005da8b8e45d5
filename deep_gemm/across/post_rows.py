"""The kernel of across/post_rows.cuh: how it is compiled, and launched for the tokens of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..casts.config import INPUTS
from ..core.gpu import gpu_of
from ..core.kernel import Kernel
from ..core.meeting import MAX_RANKS, STORAGE_BYTES, Node, Way
from .pack_rows import PackConfig


@dataclass(frozen=True)
class PostConfig(PackConfig):
    """One configuration. A CTA writes the rows of several tokens, one after the other."""

    shared_bytes: int = STORAGE_BYTES
    has_scales: bool = True
    """True if rows are FP8 with scales; false if rows and tokens are BF16."""
    taken = "id_bytes", "shared_bytes", "has_scales"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float8_e4m3fn, *INPUTS)

    @property
    def name(self) -> str:
        """Return a short name for people, such as "bfloat16 int64 uncast"."""
        return super().name + ("" if self.has_scales else " uncast")

    def choices(self) -> dict[str, str]:
        """Give the files that the source includes."""
        casts = self.has_scales and self.dtype in INPUTS
        return {"TOKEN": f"post/{'cast' if casts else 'copy'}_token.cuh"}


KERNEL: Kernel[PostConfig] = Kernel(
    "post_rows",
    "PostParams",
    lambda: [
        *(PostConfig(dtype, id_bytes) for dtype in PostConfig.dtypes for id_bytes in (4, 8)),
        *(PostConfig(torch.bfloat16, id_bytes, has_scales=False) for id_bytes in (4, 8)),
    ],
    lengths={"kMaxRanks": MAX_RANKS},
)


def run(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, row_of: Tensor, node: Node, sf: Tensor | None = None
) -> None:
    """Write tokens where the ranks of their experts fetch them, and wait until all ranks have done so.

    `x` has rows that begin at multiples of 16 bytes; ids, FP32 weights and `row_of`, int32 `[tokens, topk]`, are
    contiguous. `sf` are the scales of an x that is FP8 already, FP32 `[tokens, ceil(hidden / 128)]`, rows contiguous.
    A room of BF16 rows takes an x in BF16.
    """
    has_scales, device = node.room.gran_k is not None, x.get_device()
    config = PostConfig(x.dtype, topk_ids.element_size(), has_scales=has_scales)
    values = values_of(x, topk_ids, topk_weights, row_of, node, sf)
    KERNEL.run(config, values, grid(config, node, gpu_of(device).num_sms), device)


def grid(config: PostConfig, node: Node, num_sms: int) -> int:
    """Count CTAs: one for each of `max_tokens` tokens, but no more than run at once."""
    return min(node.room.max_tokens, config.ctas_per_sm * num_sms)


def values_of(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, row_of: Tensor, node: Node, sf: Tensor | None = None
) -> dict[str, Any]:
    """Give the members of the kernel's parameters."""
    return {
        "x": x,
        "sf": sf,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "row_of": row_of,
        "ids": node.room.ids,
        "x_pitch": x.stride(0) * x.element_size(),
        "sf_pitch": 0 if sf is None else sf.stride(0) * sf.element_size(),
        "tokens": x.shape[0],
        "max_tokens": node.room.max_tokens,
        "hidden": node.room.scales,
        "topk": node.room.topk,
        "experts_here": node.experts,
        "row_bytes": node.room.row_bytes,
        **node.meeting(Way.THERE),
    }
