"""FP8 products of groups of rows: contiguous, by ids or by ends, and masked."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from deep_gemm.core.check.layout import SCALE_BLOCK
from deep_gemm.core.settings import get_mk_alignment_for_contiguous_layout
from deep_gemm.gemm.rows import api as grouped

from ..draw import Draw
from ..trial import Right, Tensors
from . import fp8
from .groups import draw_counts, draw_layout, ids_of_ends, rows_written


def product_by_id(
    a: Tensor, b: Tensor, ids: Tensor, dtype: torch.dtype, exact: bool, columns: int = SCALE_BLOCK
) -> tuple[Tensor, Tensor | None]:
    """Each row times its group's matrix; zeros for rows of none."""
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
    faults: ClassVar = {
        "a": fp8.VALUES,
        "sfa": fp8.SCALES,
        "b": "dtype shape device",
        "sfb": fp8.SCALES,
        "layout": "dtype device",
        "d": fp8.OUTPUT,
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.turned, self.by_ends, self.exact = draw.flag(0.25), draw.flag(), draw.flag(0.8)
        self.zero_padding = draw.flag(0.7)
        self.groups, self.m = draw.rng.choice((1, 2, 5, 16, 33)), draw.size(1, 2000)
        self.n, self.k = draw.size(8, 1500, 8), self.drawn_depth(1500)
        self.dtype = torch.float32 if draw.flag(0.2) else torch.bfloat16
        b, sfb = self.weight.room((self.groups, self.n, self.k))
        self.operands = {
            "a": draw.matrix((self.m, self.k), torch.float8_e4m3fn),
            "sfa": self.scales_of_a((self.m,)),
            "b": b.mT if self.turned else b,
            "sfb": sfb.mT if self.turned else sfb,
            "layout": torch.empty(self.groups if self.by_ends else self.m, dtype=torch.int32, device=draw.device),
        }
        self.outputs = {"d": draw.output((self.m, self.n), self.dtype)}
        self.alignment = get_mk_alignment_for_contiguous_layout()

    @property
    def text(self) -> str:
        """The problem in a few words."""
        form = ("nn " if self.turned else "nt ") + ("ends" if self.by_ends else "ids")
        return (
            f"{form} {self.groups} groups {self.m}x{self.n}x{self.k} {self.dtype} exact={self.exact}{self.weight.text}"
        )

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        self.operands["layout"].copy_(draw_layout(self.draw, self.m, self.groups, self.alignment, self.by_ends))

    def fill_b(self, b: Tensor, sfb: Tensor) -> None:
        """Draw B anew."""
        self.weight.fill(*((b.mT, sfb.mT) if self.turned else (b, sfb)))

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        product = grouped.m_grouped_fp8_gemm_nn_contiguous if self.turned else grouped.m_grouped_fp8_gemm_nt_contiguous
        said: Any = {"use_psum_layout": self.by_ends, "ensure_zero_padding": self.zero_padding, **self.weight.recipes}
        product((x["a"], x["sfa"]), self.weight.given(x["b"], x["sfb"]), x["d"], x["layout"], **said)
        return {}

    def right(self) -> dict[str, Right]:
        """Group by group."""
        x = self.operands
        ids = ids_of_ends(x["layout"], self.m, self.alignment) if self.by_ends else x["layout"]
        b, sfb = (x["b"].mT, x["sfb"].mT) if self.turned else (x["b"], x["sfb"])
        a, b = fp8.spread(x["a"], x["sfa"], 1, self.weight.columns_of_a), self.weight.numbers(b, sfb)
        written = rows_written(ids, self.alignment, self.zero_padding, self.by_ends)
        return {"d": Right(*product_by_id(a, b, ids, self.dtype, self.exact, self.weight.columns), written)}


class Masked(fp8.OfFp8):
    """`m_grouped_fp8_gemm_nt_masked`."""

    kind = "m_grouped_fp8_masked"
    faults: ClassVar = {
        "a": "dtype address shape device",
        "sfa": fp8.SCALES,
        "b": "dtype address shape device",
        "sfb": fp8.SCALES,
        "masked_m": fp8.INTS,
        "d": "dtype address shape device",
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.exact, self.groups = draw.flag(0.8), draw.rng.choice((1, 2, 5, 16))
        self.max_m, self.n, self.k = draw.size(1, 600), draw.size(8, 1000, 8), self.drawn_depth(1500)
        self.dtype = torch.float32 if draw.flag(0.2) else torch.bfloat16
        self.expected_m = draw.rng.choice((1, self.max_m))
        groups = self.groups
        b, sfb = self.weight.room((groups, self.n, self.k))
        self.operands = {
            "a": draw.matrix((groups, self.max_m, self.k), torch.float8_e4m3fn),
            "sfa": self.scales_of_a((groups, self.max_m)),
            "b": b,
            "sfb": sfb,
            "masked_m": torch.empty(groups, dtype=torch.int32, device=draw.device),
        }
        self.outputs = {"d": draw.output((groups, self.max_m, self.n), self.dtype)}

    @property
    def text(self) -> str:
        """The problem in a few words."""
        return (
            f"{self.groups} groups of {self.max_m}x{self.n}x{self.k} {self.dtype} exact={self.exact}{self.weight.text}"
        )

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        self.operands["masked_m"].copy_(draw_counts(self.draw, self.groups, self.max_m))

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        grouped.m_grouped_fp8_gemm_nt_masked(
            (x["a"], x["sfa"]),
            self.weight.given(x["b"], x["sfb"]),
            x["d"],
            x["masked_m"],
            self.expected_m,
            **self.weight.recipes,
        )
        return {}

    def right(self) -> dict[str, Right]:
        """All rows, of which the first of each group are written."""
        x = self.operands
        a, b = fp8.spread(x["a"], x["sfa"], 1, self.weight.columns_of_a), self.weight.numbers(x["b"], x["sfb"])
        row = torch.arange(self.max_m, device=a.device)
        written = (row < x["masked_m"][:, None])[..., None]
        return {"d": Right(*fp8.product(a, b, None, self.dtype, self.exact, self.weight.columns), written)}
