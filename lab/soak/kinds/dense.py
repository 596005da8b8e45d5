"""Dense FP8 products: every form of operands, types of D, C, and scales by row or by block."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deep_gemm.core.check.layout import RECIPE_1D1D, ceil_div
from deep_gemm.gemm.dense import api as dense

from ..draw import Draw
from ..trial import Right, Tensors
from . import fp8

CALLS = {"nt": dense.fp8_gemm_nt, "nn": dense.fp8_gemm_nn, "tn": dense.fp8_gemm_tn, "tt": dense.fp8_gemm_tt}


class Dense(fp8.OfFp8):
    """`fp8_gemm_nt` and its relatives."""

    kind = "fp8_gemm"

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.major = draw.rng.choice(("nt", "nt", "nt", *CALLS))
        self.by_row, self.exact = draw.flag(0.3), draw.flag(0.8)
        self.dtype = torch.float32 if self.by_row or draw.flag(0.3) else torch.bfloat16
        self.c = draw.rng.choice((None, None, "c", "d"))
        self.m, self.n, self.k = draw.size(1, 3000), draw.size(8, 3000, 8), draw.size(16, 4096, 16)
        m, n, blocks = self.m, self.n, ceil_div(self.k, 128)
        a, b = draw.matrix((m, self.k), torch.float8_e4m3fn), draw.matrix((n, self.k), torch.float8_e4m3fn)
        sfa, sfb = draw.scales((m, blocks)), draw.scales((n if self.by_row else ceil_div(n, 128), blocks))
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
        return f"{self.major} {self.m}x{self.n}x{self.k} {self.dtype} C={self.c} {form} exact={self.exact}"

    def refused_faults(self) -> Mapping[str, str]:
        """Operands that are turned may be copied, wherever they are."""
        turned = "dtype shape device"
        return {
            "a": turned if self.major[0] == "t" else fp8.VALUES,
            "b": turned if self.major[1] == "n" else fp8.VALUES,
            "sfa": fp8.SCALES,
            "sfb": fp8.SCALES,
            "d": fp8.OUTPUT + " expanded",
            **({"c": "dtype shape device"} if self.c == "c" else {}),
        }

    def fill(self) -> None:
        """Draw all anew."""
        super().fill()
        self.draw_c((self.m, self.n), self.c)

    def call(self, x: Tensors) -> Tensors:
        """D is given."""
        c = {"c": x.get("c"), "d": x["d"], None: None}[self.c]
        recipe = RECIPE_1D1D if self.by_row else None
        CALLS[self.major]((x["a"], x["sfa"]), (x["b"], x["sfb"]), x["d"], c, recipe=recipe)
        return {}

    def right(self) -> dict[str, Right]:
        """In FP64."""
        x = self.operands
        a, sfa = (x["a"], x["sfa"]) if self.major[0] == "n" else (x["a"].t(), x["sfa"].t())
        b, sfb = (x["b"], x["sfb"]) if self.major[1] == "t" else (x["b"].t(), x["sfb"].t())
        c = x.get("c", self.starts.get("d"))
        rows = 1 if self.by_row else 128
        return {"d": Right(*fp8.product(fp8.spread(a, sfa, 1), fp8.spread(b, sfb, rows), c, self.dtype, self.exact))}
