"""FP8 products of heads."""

from __future__ import annotations

from typing import ClassVar

import torch

from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.api.heads import fp8_einsum

from ..draw import Draw
from ..trial import Right, Tensors
from . import fp8


class Heads(fp8.OfFp8):
    """`fp8_einsum` of tokens and weights."""

    kind = "fp8_einsum"
    faults: ClassVar = {
        "a": "dtype address shape",
        "b": "dtype shape",
        "sfa": fp8.SCALES,
        "sfb": fp8.SCALES,
        "d": "dtype address",
    }

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.turned, self.exact, self.adds = draw.flag(0.3), self.drawn_exactness(), draw.flag(0.2)
        self.b, self.h = draw.size(1, 600), draw.rng.choice((1, 2, 3, 8))
        self.n, self.k = draw.size(16, 1000, 16), draw.size(16, 1500, 16)
        blocks = ceil_div(self.n, 128), ceil_div(self.k, 128)
        sizes, scales = ((self.k, self.n), blocks[::-1]) if self.turned else ((self.n, self.k), blocks)
        self.operands = {
            "a": torch.empty((self.b, self.h, self.k), device=draw.device, dtype=torch.float32).to(torch.float8_e4m3fn),
            "sfa": torch.empty((self.b, self.h, blocks[1]), device=draw.device, dtype=torch.float32),
            "b": draw.matrix((self.h, *sizes), torch.float8_e4m3fn),
            "sfb": draw.scales((self.h, *scales)),
        }
        self.outputs = {"d": draw.output((self.b, self.h, self.n), torch.bfloat16)}

    def fill(self) -> None:
        """Draw everything anew."""
        super().fill()
        if self.adds:
            self.starts["d"] = self.draw.integers((self.b, self.h, self.n), -8, 8, torch.bfloat16)

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        expr = "bhd,hdr->bhr" if self.turned else "bhr,hdr->bhd"
        fp8_einsum(expr, *self.given(x), x["d"], x["d"] if self.adds else None)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute D head by head."""
        a, b = self.numbers()
        c = self.starts["d"].transpose(0, 1) if self.adds else None
        right, allowed = fp8.product(a.transpose(0, 1), b, c, torch.bfloat16, self.exact)
        return {"d": Right(right.transpose(0, 1), None if allowed is None else allowed.transpose(0, 1))}
