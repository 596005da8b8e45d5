"""Dense FP8 products: every form of operands, types of D, C, and scales by row or by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from deep_gemm.core.check.layout import RECIPE_1D1D, SCALE_BLOCK
from deep_gemm.gemm.api import dense

from ..draw import Draw
from ..trial import Call, Right, Tensors
from . import fp8


class Dense(fp8.OfFp8):
    """`fp8_gemm_nt` and its relatives."""

    kind = "fp8_gemm"
    calls: ClassVar[Mapping[str, Call]] = {
        "nt": dense.fp8_gemm_nt,
        "nn": dense.fp8_gemm_nn,
        "tn": dense.fp8_gemm_tn,
        "tt": dense.fp8_gemm_tt,
    }
    majors: ClassVar[tuple[str, ...]] = ("nt", "nt", "nt", *calls)
    has_rows: ClassVar[bool] = True
    """True: B may have a scale for each row."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.major = draw.rng.choice(self.majors)
        self.by_row, self.exact = draw.flag(0.3) and self.has_rows, self.drawn_exactness()
        self.dtype = torch.float32 if self.by_row or draw.flag(0.3) else torch.bfloat16
        self.c = draw.rng.choice((None, None, "c", "d"))
        self.turned_a, self.turned = self.major[0] == "t", self.major[1] == "n"
        self.rows_of_b = 1 if self.by_row else SCALE_BLOCK
        self.m, self.n, self.k = self.drawn_rows(), draw.size(8, 3000, 8), self.drawn_depth(4096)
        self.operands = {**self.room_of_a(self.m), **self.room_of_b(self.n)}
        self.outputs = {"d": draw.output((self.m, self.n), self.dtype)}
        if self.c == "c":
            self.operands["c"] = draw.matrix((self.m, self.n), self.dtype)

    def drawn_rows(self) -> int:
        """Draw m."""
        return self.draw.size(1, 3000)

    def refused_faults(self) -> Mapping[str, str]:
        """Return the faults that a call must refuse. No address is a fault in turned operands: a call may copy them."""
        turned = "dtype shape device"
        values, scales, scales_of_a = self.weight.faults
        return {
            "a": turned if self.turned_a else fp8.VALUES,
            "b": turned if self.turned and self.has_rows else values,
            "sfa": scales_of_a,
            "sfb": scales,
            "d": fp8.OUTPUT + " expanded",
            **({"c": "dtype shape device"} if self.c == "c" else {}),
        }

    def fill(self) -> None:
        """Draw everything anew."""
        super().fill()
        self.draw_c((self.m, self.n), self.c)

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        c = {"c": x.get("c"), "d": x["d"], None: None}[self.c]
        recipes = {"recipe": RECIPE_1D1D} if self.by_row else self.weight.recipes
        self.calls[self.major](*self.given(x), x["d"], c, **recipes)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D in FP64."""
        c = self.operands.get("c", self.starts.get("d"))
        return {"d": Right(*fp8.product(*self.numbers(), c, self.dtype, self.exact, self.weight.columns))}
