"""Products into the parts of heads beside the plain product of that size. Cold, on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.scales import get_mn_major_tma_aligned_tensor
from deep_gemm.core.check.layout import ceil_div
from deep_gemm.gemm.dense.api import fp8_gemm_nt
from deep_gemm.gemm.skip.api import fp8_gemm_nt_skip_head_mid
from deep_gemm.gemm.skip.check import HeadParts, parts

from . import yardsticks
from .cases import Shape
from .contenders import OURS
from .layers import ALONE
from .products import measure_each
from .report import Add, Announce, Row, cold_rows_of
from .timing import L2Flush, cold

KIND = "skip_head_mid"
HEADS = HeadParts(128, 64, 128)
CONTENDERS = (OURS, ALONE)
METHOD = (
    "skip_head_mid: fp8_gemm_nt_skip_head_mid, heads of 128 + 64 + 128 columns, shapes are m x n x k of the product; "
    "GPU time of all kernels of a call from torch.profiler, a 512 MB fill before each call to evict the L2, contenders "
    "interleaved in one process in rotating order, 20 calls each, median, least and most; random normal numbers, cast "
    "to FP8, A's scales m-major; product_alone: fp8_gemm_nt, whose bits ours must have, while 64 columns of each head "
    f"stay as they were; {yardsticks.METHOD}"
)
SHAPES: tuple[Shape, ...] = tuple((m, n, 512) for n in (32768, 8192) for m in (1, 16, 64, 128, 512, 4096))
QUICK_SHAPES: tuple[Shape, ...] = ((128, 32768, 512), (4096, 32768, 512))
REPEATS = 20
UNTOUCHED = 42.0


def shapes_of(*, quick: bool = False) -> list[Shape]:
    """List what is measured: m, n, k."""
    return list(QUICK_SHAPES if quick else SHAPES)


def measure(
    shapes: Sequence[Shape], *, only: Sequence[str] = (), add: Add, announce: Announce, with_yardsticks: bool = True
) -> None:
    """Measure products of these shapes. Whoever has timed the yardsticks leaves them out here."""
    flush = L2Flush()
    if with_yardsticks:
        add(yardsticks.measure(flush))
    measure_each(
        [(KIND, shape) for shape in shapes],
        lambda _, shape: rows_of(IntoHeads(shape, "cuda"), flush, only),
        add,
        announce,
    )


class IntoHeads:
    """Operands of a product into heads, and the plain product."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape = m, n, k = shape
        values, scales = per_token_cast_to_fp8(torch.randn(m, k, device=device, dtype=torch.float32))
        self.a = values, get_mn_major_tma_aligned_tensor(scales)
        self.b = per_block_cast_to_fp8(torch.randn(n, k, device=device, dtype=torch.float32))
        self.d = torch.full(
            (m, n // HEADS.columns * HEADS.columns_of_d), UNTOUCHED, device=device, dtype=torch.bfloat16
        )
        self.plain = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        of_scales = (m + ceil_div(n, 128)) * ceil_div(k, 128) * 4
        self.operations, self.bytes = 2 * m * n * k, (m + n) * k + m * n * 2 + of_scales

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Both ways, by name."""
        return {
            OURS: lambda: fp8_gemm_nt_skip_head_mid(self.a, self.b, self.d, HEADS),
            ALONE: lambda: fp8_gemm_nt(self.a, self.b, self.plain),
        }

    def wrong(self) -> str | None:
        """Compute both, and say what is wrong with the parts or with what lies between; None if nothing is."""
        self.d.fill_(UNTOUCHED)
        for call in self.calls().values():
            call()
        got = torch.cat(parts(self.d, HEADS), 2).view_as(self.plain)
        if not torch.equal(got, self.plain):
            return f"wrong: {int((got != self.plain).sum())} elements differ from the plain product"
        touched = int((self._between() != UNTOUCHED).sum())
        return f"wrong: {touched} elements between parts were written" if touched else None

    def _between(self) -> Tensor:
        of_heads = self.d.view(len(self.d), -1, HEADS.columns_of_d)
        return of_heads[..., HEADS.left : HEADS.left + HEADS.mid]


def rows_of(product: IntoHeads, flush: L2Flush, only: Sequence[str]) -> list[Row]:
    """Check and time both ways."""
    wrong = product.wrong()
    calls = {name: call for name, call in product.calls().items() if not only or name in only}
    return cold_rows_of(
        KIND,
        product.shape,
        cold(calls, flush, REPEATS),
        errors={},
        failed={OURS: wrong},
        operations=product.operations,
        bytes=product.bytes,
    )
