"""FP8 products of groups of rows: contiguous rows, by ids or by ends, and masked rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from deep_gemm.core.check.layout import SCALE_BLOCK, rows_of_counts
from deep_gemm.core.settings import get_mk_alignment_for_contiguous_layout
from deep_gemm.gemm.api import grouped

from ..draw import Draw
from ..trial import Call, Right, Tensors
from . import fp8
from .groups import draw_counts, draw_layout, ids_of_ends, rows_written


def product_by_id(
    a: Tensor, b: Tensor, ids: Tensor, dtype: torch.dtype, exact: bool, columns: int = SCALE_BLOCK
) -> tuple[Tensor, Tensor | None]:
    """Multiply each row by its group's matrix; a row without a group becomes zero."""
    right = torch.zeros(len(a), b.shape[1], dtype=dtype, device=a.device)
    allowed = None if exact else torch.zeros(right.shape, dtype=torch.float64, device=a.device)
    for group in range(len(b)):
        at = (ids == group).nonzero().flatten()
        right[at], bound = fp8.product(a[at], b[group], None, dtype, exact, columns)
        if allowed is not None:
            allowed[at] = bound  # type: ignore[assignment]
    return right, allowed


class Contiguous(fp8.OfFp8):
    """`m_grouped_fp8_gemm_nt_contiguous` and its nn form."""

    kind = "m_grouped_fp8_contiguous"
    calls: ClassVar[Sequence[Call]] = (
        grouped.m_grouped_fp8_gemm_nt_contiguous,
        grouped.m_grouped_fp8_gemm_nn_contiguous,
    )
    faults: ClassVar = {
        **{"a": fp8.VALUES, "sfa": fp8.SCALES, "b": "dtype shape device", "sfb": fp8.SCALES},
        **{"layout": "dtype device", "d": fp8.OUTPUT},
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.turned, self.by_ends, self.exact = draw.flag(0.25), draw.flag(), self.drawn_exactness()
        self.zero_padding = draw.flag(0.7)
        self.groups, self.m = draw.rng.choice((1, 2, 5, 16, 33)), draw.size(1, 2000)
        self.n, self.k = draw.size(8, 1500, 8), self.drawn_depth(1500)
        self.dtype = torch.float32 if draw.flag(0.2) else torch.bfloat16
        layout = torch.empty(self.groups if self.by_ends else self.m, dtype=torch.int32, device=draw.device)
        self.operands = {**self.room_of_a(self.m), **self.room_of_b(self.groups, self.n), "layout": layout}
        self.outputs = {"d": draw.output((self.m, self.n), self.dtype)}
        self.alignment = get_mk_alignment_for_contiguous_layout()

    def fill(self) -> None:
        """Draw everything anew."""
        super().fill()
        self.operands["layout"].copy_(draw_layout(self.draw, self.m, self.groups, self.alignment, self.by_ends))

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        said = {"use_psum_layout": self.by_ends, "ensure_zero_padding": self.zero_padding, **self.weight.recipes}
        self.calls[self.turned](*self.given(x), x["d"], x["layout"], **said)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D group by group."""
        layout = self.operands["layout"]
        ids = ids_of_ends(layout, self.m, self.alignment) if self.by_ends else layout
        written = rows_written(ids, self.alignment, self.zero_padding, self.by_ends)
        return {"d": Right(*product_by_id(*self.numbers(), ids, self.dtype, self.exact, self.weight.columns), written)}


class Masked(fp8.OfFp8):
    """`m_grouped_fp8_gemm_nt_masked`."""

    kind = "m_grouped_fp8_masked"
    calls: ClassVar[Sequence[Call]] = (grouped.m_grouped_fp8_gemm_nt_masked,)
    faults: ClassVar = {
        **dict.fromkeys(("a", "b", "d"), "dtype address shape device"),
        **{"sfa": fp8.SCALES, "sfb": fp8.SCALES, "masked_m": fp8.INTS},
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.exact, self.groups = self.drawn_exactness(), draw.rng.choice((1, 2, 5, 16))
        self.max_m, self.n, self.k = draw.size(1, 600), draw.size(8, 1000, 8), self.drawn_depth(1500)
        self.dtype = torch.float32 if draw.flag(0.2) else torch.bfloat16
        self.expected_m = draw.rng.choice((1, self.max_m))
        counts = torch.empty(self.groups, dtype=torch.int32, device=draw.device)
        of_b = self.room_of_b(self.groups, self.n)
        self.operands = {**self.room_of_a(self.groups, self.max_m), **of_b, "masked_m": counts}
        self.outputs = {"d": draw.output((self.groups, self.max_m, self.n), self.dtype)}

    def fill(self) -> None:
        """Draw everything anew."""
        super().fill()
        self.operands["masked_m"].copy_(draw_counts(self.draw, self.groups, self.max_m))

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        self.calls[0](*self.given(x), x["d"], x["masked_m"], self.expected_m, **self.weight.recipes)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute all rows; only the first rows of each group, up to its count, are written."""
        written = rows_of_counts(self.operands["masked_m"], self.max_m)[..., None]
        return {"d": Right(*fp8.product(*self.numbers(), None, self.dtype, self.exact, self.weight.columns), written)}
