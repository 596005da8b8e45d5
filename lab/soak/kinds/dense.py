"""Dense FP8 products: every form of operands, types of D, C, and scales by row or by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from deep_gemm.core.check.layout import RECIPE_1D1D
from deep_gemm.gemm.dense import api as dense

from ..draw import Draw
from ..trial import Right, Tensors
from . import fp8

CALLS = {"nt": dense.fp8_gemm_nt, "nn": dense.fp8_gemm_nn, "tn": dense.fp8_gemm_tn, "tt": dense.fp8_gemm_tt}


class Dense(fp8.OfFp8):
    """`fp8_gemm_nt` and its relatives."""

    kind = "fp8_gemm"
    majors: ClassVar[tuple[str, ...]] = ("nt", "nt", "nt", *CALLS)
    has_rows: ClassVar[bool] = True
    """True if B may have a scale for each row."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.major = draw.rng.choice(self.majors)
        self.by_row, self.exact = draw.flag(0.3) and self.has_rows, draw.flag(0.8)
        self.dtype = torch.float32 if self.by_row or draw.flag(0.3) else torch.bfloat16
        self.c = draw.rng.choice((None, None, "c", "d"))
        self.m, self.n, self.k = draw.size(1, 3000), draw.size(8, 3000, 8), self.drawn_depth(4096)
        m, n = self.m, self.n
        a, sfa = draw.matrix((m, self.k), torch.float8_e4m3fn), self.scales_of_a((m,))
        b, sfb = self.weight.room((n, self.k), self.rows_of_b)
        if self.major[0] == "t":
            a, sfa = a.t(), sfa.t()
        if self.major[1] == "n":
            b, sfb = b.t(), sfb.t()
        self.operands = {"a": a, "sfa": sfa, "b": b, "sfb": sfb}
        self.outputs = {"d": draw.output((m, n), self.dtype)}
        if self.c == "c":
            self.operands["c"] = draw.matrix((m, n), self.dtype)

    @property
    def text(self) -> str:
        """The problem in a few words."""
        form = "by row" if self.by_row else "by block"
        sizes = f"{self.major} {self.m}x{self.n}x{self.k} {self.dtype}"
        return f"{sizes} C={self.c} {form} exact={self.exact}{self.weight.text}"

    @property
    def rows_of_b(self) -> int:
        """Rows of B that share a scale."""
        return 1 if self.by_row else 128

    def refused_faults(self) -> Mapping[str, str]:
        """Operands that are turned may be copied, wherever they are."""
        turned = "dtype shape device"
        values, scales, scales_of_a = self.weight.faults
        return {
            "a": turned if self.major[0] == "t" else fp8.VALUES,
            "b": turned if self.major[1] == "n" and self.has_rows else values,
            "sfa": scales_of_a,
            "sfb": scales,
            "d": fp8.OUTPUT + " expanded",
            **({"c": "dtype shape device"} if self.c == "c" else {}),
        }

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        self.draw_c((self.m, self.n), self.c)

    def fill_b(self, b: Tensor, sfb: Tensor) -> None:
        """Draw B anew."""
        self.weight.fill(*((b.t(), sfb.t()) if self.major[1] == "n" else (b, sfb)))

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        c = {"c": x.get("c"), "d": x["d"], None: None}[self.c]
        recipes = {"recipe": RECIPE_1D1D} if self.by_row else self.weight.recipes
        CALLS[self.major]((x["a"], x["sfa"]), self.weight.given(x["b"], x["sfb"]), x["d"], c, **recipes)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D in FP64."""
        x = self.operands
        a, sfa = (x["a"], x["sfa"]) if self.major[0] == "n" else (x["a"].t(), x["sfa"].t())
        b, sfb = (x["b"], x["sfb"]) if self.major[1] == "t" else (x["b"].t(), x["sfb"].t())
        c = x.get("c", self.starts.get("d"))
        a, b = fp8.spread(a, sfa, 1, self.weight.columns_of_a), self.weight.numbers(b, sfb, self.rows_of_b)
        return {"d": Right(*fp8.product(a, b, c, self.dtype, self.exact, self.weight.columns))}
