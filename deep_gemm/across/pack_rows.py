"""The kernel of across/pack_rows.cuh: how it is compiled, and launched for the tokens of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..casts.config import INPUTS, VECTOR_BYTES, cast_constants
from ..core.check.layout import SCALE_BLOCK, ceil_div
from ..core.kernel import Config, Kernel


@dataclass(frozen=True)
class PackConfig(Config):
    """One configuration. A team of lanes casts 128 columns of a token."""

    dtype: torch.dtype
    id_bytes: int
    num_threads: int = 256
    ctas_per_sm: int = 6
    taken: ClassVar[tuple[str, ...]] = ("id_bytes",)
    dtypes: ClassVar[tuple[torch.dtype, ...]] = INPUTS
    """Types of tokens that the kernel takes."""

    @property
    def name(self) -> str:
        """Return a short name for people, such as "bfloat16 int64"."""
        return f"{str(self.dtype).removeprefix('torch.')} int{self.id_bytes * 8}"

    @property
    def vector(self) -> int:
        """Elements that a lane loads at once."""
        return VECTOR_BYTES // self.dtype.itemsize

    @property
    def teams(self) -> int:
        """Teams of lanes in a CTA; each team has one unit."""
        return self.num_threads * self.vector // SCALE_BLOCK

    def rules(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, rule) pairs; the kernel can be built if all hold."""
        yield self.dtype in self.dtypes, f"one of {self.dtypes}"
        yield self.id_bytes in (4, 8), "ids of 4 or 8 bytes"
        yield self.num_threads % 32 == 0, "whole warps"

    def constants(self) -> dict[str, int | bool]:
        """Give the numbers and switches that the source takes."""
        return cast_constants(self, *self.taken)


config_of = cache(PackConfig)
"""Gives the configuration for a type of tokens and bytes of an id."""
KERNEL = Kernel(
    "pack_rows", "PackParams", lambda: [config_of(dtype, id_bytes) for dtype in INPUTS for id_bytes in (4, 8)]
)


def run(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, row_of: Tensor | None, rows: Tensor) -> None:
    """Write tokens into `rows`, int32 `[rows, words]`, on the GPU that they are on.

    Rows of `x` begin at multiples of 16 bytes; ids, FP32 weights and `row_of`, int32 `[tokens, topk]`, are contiguous.
    Without `row_of` token i has row i, and rows after the last token get routes to no expert.
    """
    if rows.shape[0] > 0:
        config = config_of(x.dtype, topk_ids.element_size())
        slots = rows.shape[0] if row_of is None else x.shape[0]
        values = values_of(x, topk_ids, topk_weights, row_of, rows)
        KERNEL.run(config, values, grid(config, slots, x.shape[1]), rows.get_device())


def units_of_token(hidden: int) -> int:
    """Count a token's blocks, and its routes as one more block."""
    return ceil_div(hidden, SCALE_BLOCK) + 1


def grid(config: PackConfig, slots: int, hidden: int) -> int:
    """Count the CTAs: one team of lanes for each unit."""
    return ceil_div(slots * units_of_token(hidden), config.teams)


def values_of(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, row_of: Tensor | None, rows: Tensor) -> dict[str, Any]:
    """Give the members of the kernel's parameters."""
    tokens, hidden = x.shape
    return {
        "x": x,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "row_of": row_of,
        "rows": rows,
        "x_pitch": x.stride(0) * x.element_size() if tokens > 1 else 0,
        "tokens": tokens,
        "slots": rows.shape[0] if row_of is None else tokens,
        "hidden": hidden,
        "topk": topk_ids.shape[1],
        "row_bytes": rows.shape[1] * rows.element_size(),
        "unit_reciprocal": (1 << 32) // units_of_token(hidden),
    }
