"""Products that write parts of heads; the middle of each head must stay unchanged."""

from __future__ import annotations

from typing import ClassVar

import torch

from deep_gemm.gemm.api.heads import fp8_gemm_nt_skip_head_mid

from ..draw import Draw
from ..trial import Right, Tensors
from . import fp8


class SkipHeadMid(fp8.OfFp8):
    """`fp8_gemm_nt_skip_head_mid`."""

    kind = "skip_head_mid"
    faults: ClassVar = {"a": fp8.VALUES, "b": fp8.VALUES, "sfa": fp8.SCALES, "sfb": fp8.SCALES, "d": fp8.OUTPUT}

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        part = draw.rng.choice((16, 32, 64, 128))
        self.left, self.right_part = part * draw.rng.randint(1, 2), part * draw.rng.randint(1, 2)
        self.mid, self.heads = 8 * draw.rng.randint(1, 16), draw.size(1, 8)
        self.m, self.k, self.exact = draw.size(1, 1500), draw.size(16, 2048, 16), self.drawn_exactness()
        n = self.heads * (self.left + self.right_part)
        self.operands = {**self.room_of_a(self.m), **self.room_of_b(n)}
        self.outputs = {"d": draw.output((self.m, n + self.heads * self.mid), torch.bfloat16)}

    def call(self, x: Tensors) -> Tensors:
        """Multiply into the given D."""
        splits = (self.left, self.mid, self.right_part)
        fp8_gemm_nt_skip_head_mid(*self.given(x), x["d"], splits)
        return {}

    def right(self) -> dict[str, Right]:
        """Compute the whole product, with its columns moved to their positions in D."""
        columns = self.left + self.right_part
        product, allowed = fp8.product(*self.numbers(), None, torch.bfloat16, self.exact)
        column = torch.arange(product.shape[1], device=product.device)
        column += (column + self.right_part).div(columns, rounding_mode="floor") * self.mid
        width = self.outputs["d"].view.shape[1]
        written = torch.zeros(1, width, dtype=torch.bool, device=product.device)
        written[:, column] = True
        exact = product.new_zeros(self.m, width).index_copy_(1, column, product)
        if allowed is not None:
            allowed = allowed.new_zeros(self.m, width).index_copy_(1, column, allowed)
        return {"d": Right(exact, allowed, written)}
