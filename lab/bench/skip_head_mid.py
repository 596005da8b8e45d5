"""Products that write parts of heads, compared with the plain product of equal size. Timed cold, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.api.dense import fp8_gemm_nt
from deep_gemm.gemm.api.heads import fp8_gemm_nt_skip_head_mid
from deep_gemm.gemm.problem import HeadParts

from .cases import Shape
from .contenders import OURS, m_major
from .kinds import Call, Verdict, Work
from .layers import ALONE

HEADS = HeadParts(128, 64, 128)
METHOD = (
    "skip_head_mid: fp8_gemm_nt_skip_head_mid, heads of 128 + 64 + 128 columns, shapes are m x n x k of the product; "
    "random normal numbers, cast to FP8, A's scales m-major; product_alone: fp8_gemm_nt, whose bits ours must have, "
    "while 64 columns of each head stay as they were"
)
SHAPES: tuple[Shape, ...] = tuple((m, n, 512) for n in (32768, 8192) for m in (1, 16, 64, 128, 512, 4096))
QUICK_SHAPES: tuple[Shape, ...] = ((128, 32768, 512), (4096, 32768, 512))
UNTOUCHED = 42.0


def work_of(shape: Shape, device: str = "cuda") -> Work:
    """Make the work of a shape."""
    product = IntoHeads(shape, device)
    return Work(product.operations, product.bytes, product.calls(), {OURS: product.verdict})


class IntoHeads:
    """Operands of a product that writes parts of heads, and of the plain product."""

    def __init__(self, shape: Shape, device: str) -> None:
        m, n, k = shape
        self.a = m_major(per_token_cast_to_fp8(torch.randn(m, k, device=device, dtype=torch.float32)))
        self.b = per_block_cast_to_fp8(torch.randn(n, k, device=device, dtype=torch.float32))
        self.d = torch.full(
            (m, n // HEADS.columns * HEADS.columns_of_d), UNTOUCHED, device=device, dtype=torch.bfloat16
        )
        self.plain = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        of_scales = (m + ceil_div(n, 128)) * ceil_div(k, 128) * 4
        self.operations, self.bytes = 2 * m * n * k, (m + n) * k + m * n * 2 + of_scales

    def calls(self) -> dict[str, Call]:
        """Return the calls of both products, by name."""
        return {
            OURS: lambda: fp8_gemm_nt_skip_head_mid(self.a, self.b, self.d, HEADS),
            ALONE: lambda: fp8_gemm_nt(self.a, self.b, self.plain),
        }

    def verdict(self) -> Verdict:
        """Compute both products, and judge D's parts and the gaps between these parts."""
        self.d.fill_(UNTOUCHED)
        for call in self.calls().values():
            call()
        got = torch.cat(HEADS.of(self.d), 2).view_as(self.plain)
        if not torch.equal(got, self.plain):
            return None, f"wrong: {int((got != self.plain).sum())} elements differ from the plain product"
        touched = int((self._between() != UNTOUCHED).sum())
        return None, f"wrong: {touched} elements between parts were written" if touched else None

    def _between(self) -> Tensor:
        of_heads = self.d.view(len(self.d), -1, HEADS.columns_of_d)
        return of_heads[..., HEADS.left : HEADS.left + HEADS.mid]
