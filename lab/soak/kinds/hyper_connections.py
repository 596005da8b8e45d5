"""The product that precedes the norm of hyper-connections. All sums are exact."""

from __future__ import annotations

from typing import ClassVar

import torch

from deep_gemm.core.check.layout import parts_of
from deep_gemm.hyper.api import tf32_hc_prenorm_gemm

from ..draw import Draw
from ..trial import Right, Tensors, Trial

BLOCK = 64


class HcPrenorm(Trial):
    """`tf32_hc_prenorm_gemm`."""

    kind = "hc_prenorm"
    faults: ClassVar = {
        "a": "dtype address stride shape device",
        "b": "dtype address stride device",
        "d": "dtype shape device",
        "sqr_sum": "dtype shape device",
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.m, self.n, self.k = draw.size(1, 3000), draw.rng.choice((8, 16, 24, 32)), draw.size(64, 8192, 64)
        self.splits = draw.rng.choice((None, None, 1, 3, 16))
        self.operands = {
            "a": draw.matrix((self.m, self.k), torch.bfloat16),
            "b": draw.matrix((self.n, self.k), torch.float32),
        }
        outer = () if self.splits is None else (self.splits,)
        self.outputs = {"d": draw.output((*outer, self.m, self.n), torch.float32, packed=True)}
        squares = draw.output((self.splits or 1, self.m), torch.float32, packed=True)
        if self.splits is None:
            squares.view = squares.view[0]
        self.outputs["sqr_sum"] = squares

    def fill(self) -> None:
        """Draw integers."""
        for x in self.operands.values():
            x.copy_(self.draw.integers(x.shape, -4, 4))

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the two given outputs."""
        tf32_hc_prenorm_gemm(x["a"], x["b"], x["d"], x["sqr_sum"], self.splits)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute the outputs split by split."""
        products, squares = [], []
        for blocks in parts_of(self.k // BLOCK, self.splits or 1):
            ks = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
            a = self.operands["a"][:, ks].double()
            products.append(a @ self.operands["b"][:, ks].double().t())
            squares.append(a.square().sum(1))
        d, sqr_sum = torch.stack(products), torch.stack(squares)
        if self.splits is None:
            d, sqr_sum = d[0], sqr_sum[0]
        return {"d": Right(d), "sqr_sum": Right(sqr_sum)}
