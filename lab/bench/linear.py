"""Linear layers compared with their product alone, torch's BF16 layer, a copy of the cast's bytes. Timed cold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from rich.table import Table
from torch import Tensor

from deep_gemm.casts.fp8 import per_block_cast_to_fp8, per_token_cast_to_fp8
from deep_gemm.casts.rules import Quantized
from deep_gemm.core.check.layout import SCALE_BLOCK, ceil_div
from deep_gemm.gemm.api.dense import fp8_gemm_nt
from deep_gemm.linear import api as public

from ..casts import cast_by_torch
from . import layers, table
from .bench import Bench, planned
from .cases import all_cases
from .casts import copy_of
from .contenders import BF16, OURS, m_major
from .fp4 import PRODUCT
from .layers import ALONE, CAST, COPY, EAGER, Layer, Steps, Work
from .products import measure_each
from .report import Add, Announce, Report, Row
from .timing import L2Flush

METHOD = (
    f"linear: {layers.METHOD}; BF16 activations and weights of random normal numbers, the weight quantized 128x128; "
    "deep_gemm: deep_gemm.linear; product_alone: fp8_gemm_nt, A cast before, its scales m-major; bf16: x @ w.T by "
    "cuBLAS and by cuBLASLt, the faster one, named by config; copy: of as many bytes as the cast reads and writes, "
    "half of them read; torch: the cast in torch operations, then fp8_gemm_nt; our result is that of the cast and the "
    "product bit for bit; error: relative, beside BF16"
)
MS, QUICK_MS = (1, 16, 64, 4096), (1, 4096)
CONTENDERS = (OURS, ALONE, BF16, COPY, EAGER)
MOST_ERROR = 0.05
MOST_AT_ONCE = 1 << 26
"""Elements of a result that are converted to FP64 at a time: 0.5 GB."""


def shapes_of(*, quick: bool = False) -> list[tuple[int, int, int]]:
    """List shapes: the weights that the dense benchmark measures with many values of m, here with a few values."""
    count = Counter(case.shape[1:] for case in all_cases() if case.kind == "dense")
    weights = [weight for weight, cases in count.items() if cases > 2]
    return [(m, n, k) for n, k in weights[: 2 if quick else None] for m in (QUICK_MS if quick else MS)]


def measure(shapes: Sequence[tuple[int, int, int]], *, only: Sequence[str] = (), add: Add, announce: Announce) -> None:
    """Measure layers of these shapes."""
    flush = L2Flush()

    def rows_of(_: str, shape: Sequence[int]) -> list[Row]:
        m, n, k = shape
        linear = Linear(m, n, k, "cuda")
        return layers.rows_of(linear.work, layers.only_asked_for(linear.contenders(), only), linear.check, flush)

    measure_each([("linear", shape) for shape in shapes], rows_of, add, announce)


class Linear:
    """Operands of a linear layer, and the ways to compute it."""

    def __init__(self, m: int, n: int, k: int, device: str) -> None:
        self.x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        self.plain = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        self.w = per_block_cast_to_fp8(self.plain)
        self.out, self.d = (torch.empty(m, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        blocks = ceil_div(k, SCALE_BLOCK)
        count = (m * k + m * n) * 2 + n * k + ceil_div(n, SCALE_BLOCK) * blocks * 4
        self.work = Work("linear", (m, n, k), 2 * m * n * k, count, cast_bytes=m * k * 3 + m * blocks * 4)

    def contenders(self) -> Iterator[Layer]:
        """Yield every way to compute the layer. Each way writes to separate memory."""
        x, w, d = self.x, self.w, self.d
        a = m_major(per_token_cast_to_fp8(x))
        cast: list[Quantized] = []

        def cast_in_torch() -> None:
            cast[:] = [m_major(cast_by_torch(x, 1, SCALE_BLOCK))]

        steps: Steps = ((CAST, cast_in_torch), (PRODUCT, lambda: fp8_gemm_nt(cast[0], w, d)))
        yield Layer(OURS, lambda: public.linear(x, w, out=self.out), parts=layers.parts_of_linear)
        yield Layer(ALONE, lambda: fp8_gemm_nt(a, w, d), parts=layers.parts_of_linear)
        for library in ("cublas", "cublaslt"):
            yield Layer(BF16, partial(self._in_bf16, library), chain=library)
        yield Layer(COPY, copy_of(self.work.cast_bytes, x.device.type))
        yield Layer(EAGER, lambda: [call() for _, call in steps], steps=steps)

    def _in_bf16(self, library: str) -> Tensor:
        """Compute the layer by torch, with one of the two libraries that torch can use for products."""
        if not self.x.is_cuda:
            return self.x @ self.plain.t()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            return self.x @ self.plain.t()
        finally:
            torch.backends.cuda.preferred_blas_library("default")

    def check(self, call: Callable[[], object]) -> tuple[float, str | None]:
        """Run a call that writes to `out`, and judge the result."""
        self.out.fill_(torch.nan)
        call()
        return self.judge(self.out)

    def judge(self, out: Tensor) -> tuple[float, str | None]:
        """Return the error of a result, and a sentence if it is wrong."""
        right = torch.empty_like(out)
        fp8_gemm_nt(per_token_cast_to_fp8(self.x), self.w, right)
        error = relative_error(out, self.x @ self.plain.t())
        if not torch.equal(out, right):
            return error, f"wrong: {int((out != right).sum())} elements differ from the cast and the product"
        return error, None if error <= MOST_ERROR else f"wrong: relative error {error:.2g}, expected {MOST_ERROR}"


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Compute the relative error of a whole tensor, converting a piece at a time to FP64."""
    off = size = torch.zeros((), dtype=torch.float64, device=expected.device)
    pieces = (torch.split(each.flatten(), MOST_AT_ONCE) for each in (got, expected))
    for piece, right in zip(*pieces, strict=True):
        wide = right.double()
        off = off + (piece.double() - wide).square().sum()
        size = size + wide.square().sum()
    return float((off / size).sqrt())


COLUMNS = (
    table.shape("m x n x k"),
    table.ours(),
    *table.beside(ALONE, "product"),
    table.Column("+ copy", lambda line: table.figure(_with_copy(line))),
    table.Column("ratio", lambda line: table.ratio(line.over(_with_copy(line)))),
    *table.beside(BF16, "bf16"),
    table.time(EAGER, "torch"),
)


def _with_copy(line: table.Line) -> float | None:
    alone, copy = line.us(ALONE), line.us(COPY)
    return alone + copy if alone and copy else None


def tables(report: Report) -> list[Table]:
    """Tabulate our times, and for each m the mean ratios to the product alone, to product and copy, and to BF16."""
    lines = table.lines_of(report)
    ratios = (
        ((str(line.row.shape[0]),), tuple(map(line.over, (line.us(ALONE), _with_copy(line), line.us(BF16)))))
        for line in lines
    )
    means = table.means_of(["m"], ["/ product", "/ product + copy", "/ bf16"], ratios)
    return [table.table_of("linear", COLUMNS, lines), means]


PLAN = planned(shapes_of, measure, (3,), "64,2112,7168")
BENCH = Bench("linear", METHOD, PLAN, tables, contenders=CONTENDERS, drawn_by="plot_layers")
